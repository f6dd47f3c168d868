"""Arithmetic intensity of unfused attention and of kernels over sequence length, and the ridge point."""

from collections.abc import Iterable

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.tuner.analysis.charts import Chart
from flashtune.tuner.analysis.explain import roofline
from flashtune.tuner.analysis.model_overview import unfused_problems
from flashtune.tuner.tables.kernel_choice import choose
from flashtune.tuner.workloads.short_shape import by_length


def intensity(problems: Iterable[Problem], target: Target, db: str | None) -> tuple[Chart, ...]:
    """Returns operations per byte of HBM traffic, one chart for problems that differ only in length."""
    return tuple(_chart(title, group, target, db) for title, group in by_length(problems).items())


def _chart(title: str, problems: list[Problem], target: Target, db: str | None) -> Chart:
    floors = [roofline(problem, target) for problem in problems]
    chosen = [choose(problem, target, db) for problem in problems]
    fused = [
        floor.flops / sum(item.bytes for item in each.family.hbm_items(problem, each.config, target))
        for problem, each, floor in zip(problems, chosen, floors, strict=True)
    ]
    return Chart(
        title=f"Arithmetic intensity on {target.short_name}, {title}",
        across="tokens",
        positions=tuple(problem.seqlen_kv for problem in problems),
        unit="FLOP/byte",
        lines={
            "unfused": tuple(_unfused(problem, target) for problem in problems),
            "fused": tuple(fused),
            "inputs and output once": tuple(floor.intensity for floor in floors),
        },
        limits={"ridge point": floors[0].ridge},
        notes={"families": ", ".join(dict.fromkeys(each.family.name for each in chosen))},
    )


def _unfused(problem: Problem, target: Target) -> float:
    plain, full = unfused_problems(problem)
    return roofline(full, target).flops / sum(item.bytes for item in standard_hbm_items(plain))
