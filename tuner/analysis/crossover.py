"""The length from which on kernels are faster than unfused attention: measured on a GPU, or predicted."""

from collections.abc import Iterable, Mapping, Sequence

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.tuner.analysis.charts import Chart, Values
from flashtune.tuner.analysis.explain import roofline
from flashtune.tuner.analysis.model_overview import unfused_problems
from flashtune.tuner.tables.kernel_choice import choose
from flashtune.tuner.workloads.short_shape import by_length

FASTER_FROM = "fused is faster from, tokens"
# Assumed time of an operator in addition to its traffic: the launch of a short kernel on an H200.
OPERATOR_MS = 0.0037
# Items of the traffic of unfused attention that have no operator of their own: inputs and outputs.
TENSORS = 3
Times = tuple[float | None, float | None]


def crossover(times: Mapping[Problem, Times], how: str) -> tuple[Chart, ...]:
    """Returns times over length, and the shortest length from which on fused attention is faster.

    `times` are those of unfused and of fused attention in ms, None where there is no result. `how` says how
    they were obtained. Problems that differ only in length have one chart.
    """
    charts = []
    for title, group in by_length(times).items():
        lengths = tuple(problem.seqlen_kv for problem in group)
        unfused, fused = (tuple(times[problem][side] for problem in group) for side in (0, 1))
        charts.append(
            Chart(
                title=f"{title}, {how}",
                across="tokens",
                positions=lengths,
                unit="ms",
                lines={"unfused": unfused, "fused": fused},
                notes={FASTER_FROM: faster_from(lengths, unfused, fused), "times": how},
            )
        )
    return tuple(charts)


def faster_from(lengths: Sequence[int], unfused: Values, fused: Values) -> int | None:
    """Returns the shortest length from which on fused attention is always faster, None without one."""
    start = None
    for length, slow, fast in reversed(list(zip(lengths, unfused, fused, strict=True))):
        if slow is not None and fast is not None and fast >= slow:
            break
        start = length
    return start


def predicted_times(problems: Iterable[Problem], target: Target, db: str | None) -> dict[Problem, Times]:
    """Returns the times of unfused attention by its operators and traffic, and the makespans of kernels."""
    times: dict[Problem, Times] = {}
    for problem in problems:
        plain, full = unfused_problems(problem)
        items = standard_hbm_items(plain)
        traffic = sum(item.bytes for item in items) / (target.hbm_bandwidth * 1e6)
        unfused = (len(items) - TENSORS) * OPERATOR_MS + max(traffic, roofline(full, target).matrix_ms)
        chosen = choose(problem, target, db)
        times[problem] = unfused, chosen.family.makespan_ms(problem, chosen.config, target)
    return times
