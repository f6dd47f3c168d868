"""Ranks recorded problems by the total time of their calls."""

from pathlib import Path
from typing import NamedTuple

from flashtune.core.errors import UsageError
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.recording.recorder import CallCount, read_counts
from flashtune.tuner.analysis.explain import roofline

# Counting the pairs of a chunked mask takes one step for each chunk.
MAX_CHUNKS = 2**20


class WeightedProblem(NamedTuple):
    """A problem that programs called."""

    problem: Problem
    calls: int  # Number of calls, for any alignment of their tensors.
    least_ms: float  # Minimum time of all these calls on a target, by its peak rates.


def weigh(counts: tuple[CallCount, ...], target: Target) -> tuple[WeightedProblem, ...]:
    """Returns recorded problems without duplicates, ranked by the time of their calls on a target."""
    calls: dict[Problem, int] = {}
    for count in counts:
        calls[count.problem] = calls.get(count.problem, 0) + count.calls
    weighted = [
        WeightedProblem(problem, number, number * _least_ms(problem, target))
        for problem, number in calls.items()
    ]
    return tuple(sorted(weighted, key=lambda entry: -entry.least_ms))


def _least_ms(problem: Problem, target: Target) -> float:
    if problem.chunk and problem.seqlen_q // problem.chunk > MAX_CHUNKS:
        raise UsageError(
            f"{problem.key} has more than {MAX_CHUNKS:,} chunks: leave it out of what is recorded"
        )
    return roofline(problem, target).bound_ms


def read_weighted(path: Path, target: Target) -> tuple[WeightedProblem, ...]:
    """Returns the problems of a file that `flashtune.record_calls` wrote, ranked as by `weigh`."""
    weighted = weigh(read_counts(path), target)
    if not weighted:
        raise UsageError(
            f"{path} holds no recorded calls: run a program with FLASHTUNE_RECORD set to a file, or call "
            "flashtune.attention within flashtune.record_calls"
        )
    return weighted


def summary(weighted: tuple[WeightedProblem, ...], top: int) -> str:
    """Returns the fraction of the recorded time that the first problems cover, in one sentence."""
    taken = weighted[:top]
    whole = sum(entry.least_ms for entry in weighted)
    share = sum(entry.least_ms for entry in taken) / whole if whole else 1.0
    return (
        f"{len(taken)} of {len(weighted)} recorded problems are searched, {share:.0%} of the time that all "
        "recorded calls take by peak rates"
    )
