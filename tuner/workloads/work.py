"""Operations, bytes and speed of a problem with its usual lengths of sequences."""

import enum
from collections.abc import Iterable

import msgspec

from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.problem import Problem
from flashtune.verification.lengths import is_ragged, usual_lengths


class Unit(enum.StrEnum):
    """A unit of speed."""

    TFLOPS = "TFLOP/s"
    GBPS = "GB/s"


def is_decode(problem: Problem) -> bool:
    """Returns whether each head of a sequence has one query, so that most bytes are keys and values."""
    return problem.seqlen_q == 1 and not problem.is_backward


def unit_of(problem: Problem) -> Unit:
    """Returns the unit of a problem's speed."""
    return Unit.GBPS if is_decode(problem) else Unit.TFLOPS


def rate(problem: Problem, ms: float) -> float:
    """Returns the speed of a run of `ms` milliseconds, in the problem's unit."""
    return kv_bytes(problem) / ms / 1e6 if is_decode(problem) else operations(problem) / ms / 1e9


def operations(problem: Problem) -> int:
    """Returns `Problem.nominal_flops`; those of visible pairs if lengths of sequences differ."""
    if not is_ragged(problem):
        return problem.nominal_flops()
    return sum(group.flops() for group in _sequences(problem))


def kv_bytes(problem: Problem) -> int:
    """Returns the bytes of visible keys and values, each read once for its KV head."""
    keys = problem.kv_heads * sum(group.batch * distinct_keys(group.sight) for group in _sequences(problem))
    width = problem.head_dim + (0 if problem.mla else problem.value_head_dim)
    return keys * width * problem.kv_itemsize


def _sequences(problem: Problem) -> Iterable[Problem]:
    """Returns problems of equal lengths that together are as much work as a problem."""
    if not is_ragged(problem):
        return (problem,)
    padded = msgspec.structs.replace(problem, batch=1, packed=0, kv_lengths=False, page_size=0)
    return (
        msgspec.structs.replace(padded, seqlen_q=queries, seqlen_kv=keys)
        for queries, keys in zip(*usual_lengths(problem), strict=True)
    )
