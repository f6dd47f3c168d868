"""Units of a problem's speed: TFLOP/s, or GB/s of the cache if reading it dominates."""

from __future__ import annotations

import enum

from flashtune.core.mask_geometry import distinct_keys
from flashtune.core.problem import Dtype, Problem
from flashtune.tuner.bench.results import Row


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


def speed_of(problem: Problem, row: Row) -> float:
    """Returns a row's speed in the problem's unit."""
    return kv_bytes(problem) / row.ms / 1e6 if is_decode(problem) else row.tflops


def kv_bytes(problem: Problem) -> int:
    """Returns the bytes of visible keys and values, each read once for its KV head."""
    keys = problem.batch * problem.kv_heads * distinct_keys(problem.sight)
    width = problem.head_dim + (0 if problem.latent else problem.value_head_dim)
    return keys * width * problem.kv_itemsize


def decode_case(problem: Problem) -> str | None:
    """Returns the name of plain decoding in files of figures, None for other problems.

    An example is `decode b16 hq32 hkv8 s8192 d128 [GB/s]`.
    """
    usual = problem.dtype is Dtype.BF16 and problem.head_dim == problem.value_head_dim
    if not is_decode(problem) or not usual or problem.features:
        return None
    heads = f"hq{problem.heads} hkv{problem.kv_heads}"
    return f"decode b{problem.batch} {heads} s{problem.seqlen_kv} d{problem.head_dim} [{Unit.GBPS}]"
