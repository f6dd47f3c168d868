"""Groups benches into panels: one for each head dim and mask, with a line for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashtune.core.problem import Causal, Dtype, Problem, feature_words
from flashtune.tuner.bench.results import Bench, BenchRun, Unit, is_decode, unit_of

# Name of the ceilings in lists of contestants.
CEILING = "matrix product"
COPY = "device copy"


class Panel(NamedTuple):
    """Benches that differ only in lengths and batch, shortest first.

    Attributes:
        title: Their common properties.
        dtype: Element type, which selects their ceiling.
        benches: At least one.
    """

    title: str
    dtype: Dtype
    benches: tuple[Bench, ...]

    @property
    def unit(self) -> Unit:
        """Returns the unit of speeds."""
        return unit_of(self.benches[0].problem)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the contestants with a row in the panel, ours first."""
        return tuple(dict.fromkeys(row.name for bench in self.benches for row in bench.rows))

    def ceilings(self, run: BenchRun) -> tuple[tuple[str, float], ...]:
        """Returns names and values of the ceilings of the same run in the panel's unit."""
        if self.unit is Unit.GBPS:
            return ((COPY, run.copy.gbps),) if run.copy else ()
        return tuple((CEILING, entry.tflops) for entry in run.ceilings if entry.dtype is self.dtype)


def panels(benches: Sequence[Bench]) -> tuple[Panel, ...]:
    """Returns the panels of a run, in the order of their first problems."""
    groups: dict[str, list[Bench]] = {}
    for bench in benches:
        groups.setdefault(title_of(bench.problem), []).append(bench)
    return tuple(
        Panel(title, group[0].problem.dtype, tuple(sorted(group, key=_lengths)))
        for title, group in groups.items()
    )


def title_of(problem: Problem) -> str:
    """Returns the common properties of a panel: `bf16, head dim 128, 16 heads, causal`."""
    width = f"head dim {problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        width += f" (values {problem.value_head_dim})"
    heads = f"{problem.heads} heads"
    if problem.kv_heads != problem.heads:
        heads += f" on {problem.kv_heads}"
    what = "decode, " if is_decode(problem) else "backward, " if problem.is_backward else ""
    asked = feature_words(problem).replace("_", ", ")
    return f"{what}{problem.dtype}, {width}, {heads}, {_mask(problem)}{asked}"


def _mask(problem: Problem) -> str:
    if problem.causal is Causal.NONE:
        return "full"
    if problem.seqlen_q == problem.seqlen_kv or is_decode(problem):
        return "causal"
    return f"causal {problem.causal.value.replace('_', '-')}"


def lengths_of(problem: Problem) -> str:
    """Returns the properties in which problems of a panel differ: `4096`, or `1 to 4096`, and the batch."""
    lengths = str(problem.seqlen_kv)
    if problem.seqlen_q != problem.seqlen_kv:
        lengths = f"{problem.seqlen_q} to {lengths}"
    return f"{lengths}, batch {problem.batch}"


def _lengths(bench: Bench) -> tuple[int, int, int]:
    return bench.problem.seqlen_kv, bench.problem.seqlen_q, bench.problem.batch
