"""Which tuned shape stands in for one that nobody tuned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record

# How many steps of a factor of two away what was measured still says how much longer a launch takes than its
# schedule.
REACH = 1.5
# The mean of all shapes counts beside the near ones as much as this share of one.
PRIOR = 0.3
# Beyond a factor of four in some extent, a neighbour's config is a guess, and dispatch says so.
FAR = 2.0
# With so few queries keys must be split among programs.
FEW_QUERIES = 16


def same_computation(problem: Problem) -> tuple[Problem, ...]:
    """A problem and the others that compute the same under another name of the mask, itself first.

    With equal lengths both alignments draw one diagonal; a single query that is aligned
    bottom-right sees every key. Where each sequence has lengths of its own, equal bounds mean nothing.
    """
    ragged = problem.packed or problem.lengths or problem.page_size
    square = problem.seqlen_q == problem.seqlen_kv and not ragged
    names = [problem.causal]
    if square and problem.causal is not Causal.NONE:
        names += [Causal.BOTTOM_RIGHT, Causal.TOP_LEFT]
    if problem.seqlen_q == 1 and (problem.causal is not Causal.TOP_LEFT or square):
        names += [Causal.NONE, Causal.BOTTOM_RIGHT]
    return tuple(msgspec.structs.replace(problem, causal=name) for name in dict.fromkeys(names))


def tuned_alike(problem: Problem, records: Iterable[Record]) -> list[Record]:
    """The records whose kernels compute the problem too: rightness hangs on static features alone."""
    masks = [same.causal for same in same_computation(problem)]
    computation = _unmasked(problem)
    return [
        record
        for record in records
        if record.problem.causal in masks
        and (record.problem.dtype, record.problem.head_dim) == (problem.dtype, problem.head_dim)
        and _unmasked(record.problem) == computation
    ]


def nearest_record(problem: Problem, records: Iterable[Record]) -> Record | None:
    """The record of the nearest shape with the same static features, or None without any.

    Where two are equally near, the key decides, so that all ranks choose alike; of one shape's records the
    first.
    """
    masks = [same.causal for same in same_computation(problem)]
    alike = tuned_alike(problem, records)
    return min(alike, key=lambda record: _rank(record, problem, masks), default=None)


def distance(one: Problem, other: Problem) -> float:
    """How far two shapes are apart: steps of a factor of two, summed as squares over four extents."""
    return math.dist(_extents(one), _extents(other))


def regression(known: Sequence[tuple[float, float]], reach: float = REACH) -> float:
    """The expected value at a shape: the mean of all known values, moved towards those of near shapes.

    Args:
        known: Values at other shapes, at least one, each with the distance of its shape.
        reach: How far away a value still counts, in steps of a factor of two.
    """
    mean = sum(value for value, _ in known) / len(known)
    weights = [weight(steps, reach) for _, steps in known]
    moved = sum(each * (value - mean) for each, (value, _) in zip(weights, known, strict=True))
    return mean + moved / (sum(weights) + PRIOR)


def weight(steps: float, reach: float) -> float:
    """How much a shape counts that is so many steps of a factor of two away."""
    return math.exp(-0.5 * (steps / reach) ** 2)


def is_far(one: Problem, other: Problem) -> bool:
    """Whether some extent differs by more than a factor of four."""
    return max(abs(a - b) for a, b in zip(_extents(one), _extents(other), strict=True)) > FAR


def _rank(record: Record, problem: Problem, masks: list[Causal]) -> tuple[float, int, str]:
    return distance(record.problem, problem), masks.index(record.problem.causal), record.problem.key


def _unmasked(problem: Problem) -> Problem:
    """What is the same of two problems if a config renders to one kernel for both, but for the mask."""
    return msgspec.structs.replace(problem.computation, causal=Causal.NONE)


def _extents(problem: Problem) -> tuple[float, float, float, float]:
    """What decides which config is best: both lengths, the programs in flight, the sharing of keys.

    Packed sequences count as so many of the longest as there are tokens for.
    """
    sequences = problem.batch
    if problem.packed:
        sequences = -(-problem.packed // max(1, problem.seqlen_q))
    numbers = (problem.seqlen_q, problem.seqlen_kv, sequences * problem.heads, problem.group_size)
    queries, keys, programs, group = (math.log2(max(1, number)) for number in numbers)
    return queries, keys, programs, group
