"""Benches that belong side by side: one panel for each head dim and mask, one line for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashtune.problem import Causal, Dtype, Problem
from flashtune.tuner.bench_records import Bench

# What the ceiling is called beside the contestants.
CEILING = "matrix product"


class Panel(NamedTuple):
    """Benches that differ in lengths and batch alone, shortest first.

    Attributes:
        title: What they share.
        dtype: Element type, which says which ceiling is theirs.
        benches: At least one.
    """

    title: str
    dtype: Dtype
    benches: tuple[Bench, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The contestants that have a row anywhere in the panel, ours first."""
        return tuple(dict.fromkeys(row.name for bench in self.benches for row in bench.rows))


def panels(benches: Sequence[Bench]) -> tuple[Panel, ...]:
    """The panels of a run, in the order in which their first problems ran."""
    groups: dict[str, list[Bench]] = {}
    for bench in benches:
        groups.setdefault(title_of(bench.problem), []).append(bench)
    return tuple(
        Panel(title, group[0].problem.dtype, tuple(sorted(group, key=_lengths)))
        for title, group in groups.items()
    )


def title_of(problem: Problem) -> str:
    """What the problems of a panel share: `bf16, head dim 128, 16 heads, causal`."""
    width = f"head dim {problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        width += f" (values {problem.value_head_dim})"
    heads = f"{problem.heads} heads"
    if problem.kv_heads != problem.heads:
        heads += f" on {problem.kv_heads}"
    return f"{problem.dtype}, {width}, {heads}, {_mask(problem)}"


def _mask(problem: Problem) -> str:
    if problem.causal is Causal.NONE:
        return "full"
    if problem.seqlen_q == problem.seqlen_kv:
        return "causal"
    return f"causal {problem.causal.value.replace('_', '-')}"


def lengths_of(problem: Problem) -> str:
    """What tells the problems of a panel apart: `4096`, or `1 to 4096`, and the batch."""
    lengths = str(problem.seqlen_kv)
    if problem.seqlen_q != problem.seqlen_kv:
        lengths = f"{problem.seqlen_q} to {lengths}"
    return f"{lengths}, batch {problem.batch}"


def _lengths(bench: Bench) -> tuple[int, int, int]:
    return bench.problem.seqlen_kv, bench.problem.seqlen_q, bench.problem.batch
