"""Distances between shapes, and the nearest tuned shape of an untuned one."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record
from flashtune.dispatch.tables import same_computation
from flashtune.templates.common.model.traffic import unpacked

# Length scale of the corrections of launch times, in steps of a factor of two.
LENGTH_SCALE = 1.5
# Weight of the mean of all shapes, in units of one near shape.
PRIOR_WEIGHT = 0.3
# If an extent differs by more than a factor of four, the nearest config is a guess, and dispatch warns.
FAR = 2.0
# With at most this many queries, keys must be split among programs. This family does that.
FEW_QUERIES = 16
DECODING_FAMILY = "decode_split_kv"
# A family that computes most problems, with and without splits.
WHOLE_FAMILY = "forward_masked"
# The same holds for more queries if splits reduce a schedule to this fraction, and if there are as many keys.
# Launches dominate with fewer.
SPLIT_GAIN, LONG_KEYS = 0.5, 1024


def may_split(problem: Problem) -> bool:
    """Whether a problem is a forward pass of many queries over keys that are worth a split."""
    many = problem.seqlen_q > FEW_QUERIES and problem.seqlen_kv >= LONG_KEYS
    return many and not problem.is_backward and not problem.mla


def splits_keys(record: Record) -> bool:
    """Whether a record's kernel splits keys, or may do so at other shapes."""
    return record.family == DECODING_FAMILY or getattr(record.config, "num_splits", 1) > 1


def without_hidden_keys(problem: Problem) -> Problem:
    """Returns a problem without the last keys if no query sees them."""
    if problem.causal is Causal.TOP_LEFT and problem.seqlen_q < problem.seqlen_kv:
        return msgspec.structs.replace(problem, seqlen_kv=problem.seqlen_q)
    return problem


def is_short_prompt(record: Record, problem: Problem) -> bool:
    """Whether a record's kernel splits keys and a problem has many queries and keys that are not worth it."""
    many = problem.seqlen_q > FEW_QUERIES and not problem.mla
    return record.family == DECODING_FAMILY and many and not may_split(problem)


def tuned_alike(problem: Problem, records: Iterable[Record]) -> list[Record]:
    """Returns the records whose kernels also compute the problem. This depends on static features only."""
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
    """Returns the record of the nearest shape with the same static features, or None.

    If shapes are equally near, the problem's own mask and then the smallest key win, so that all ranks agree.
    Of records of one shape, the first wins.
    """
    masks = [same.causal for same in same_computation(problem)]
    alike = tuned_alike(problem, records)
    return min(alike, key=lambda record: _rank(record, problem, masks), default=None)


def distance(first: Problem, other: Problem) -> float:
    """Returns the Euclidean distance of two shapes over four extents, in steps of a factor of two."""
    return math.dist(_extents(first), _extents(other))


def regression(values: Sequence[tuple[float, float]], reach: float = LENGTH_SCALE) -> float:
    """Returns the estimate at a shape: the mean of all known values, shifted towards those of near shapes.

    `values` are those at other shapes, at least one, each with the distance of its shape. `reach` is the
    length scale of the weights, in steps of a factor of two.
    """
    mean = sum(value for value, _ in values) / len(values)
    weights = [weight(steps, reach) for _, steps in values]
    moved = sum(each * (value - mean) for each, (value, _) in zip(weights, values, strict=True))
    return mean + moved / (sum(weights) + PRIOR_WEIGHT)


def weight(steps: float, reach: float) -> float:
    """Returns the weight of a shape at this distance in steps of a factor of two."""
    return math.exp(-0.5 * (steps / reach) ** 2)


def is_far(first: Problem, other: Problem) -> bool:
    """Whether some extent differs by more than a factor of four."""
    return max(abs(a - b) for a, b in zip(_extents(first), _extents(other), strict=True)) > FAR


def _rank(record: Record, problem: Problem, masks: list[Causal]) -> tuple[float, int, str]:
    return distance(record.problem, problem), masks.index(record.problem.causal), record.problem.key


def _unmasked(problem: Problem) -> Problem:
    """Returns a problem's static features without the mask. If equal, a config renders to one kernel."""
    return msgspec.structs.replace(problem.computation, causal=Causal.NONE)


def _extents(problem: Problem) -> tuple[float, float, float, float]:
    """Returns logarithms of the extents that affect the best config: both lengths, batch · heads, group size.

    Those of a varlen problem are the extents of a similar dense batch.
    """
    problem = unpacked(problem)
    numbers = (problem.seqlen_q, problem.seqlen_kv, problem.batch * problem.heads, problem.group_size)
    queries, keys, programs, group = (math.log2(max(1, number)) for number in numbers)
    return queries, keys, programs, group
