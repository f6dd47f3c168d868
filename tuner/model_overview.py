"""Attention of a whole model over sequence length: memory, HBM traffic, and time by the roofline."""

from __future__ import annotations

import enum

import msgspec

from flashtune.errors import UsageError
from flashtune.problem import Causal, Dtype, Problem
from flashtune.standard import score_bytes, standard_hbm_items
from flashtune.target import Target
from flashtune.tuner.chosen import choose
from flashtune.tuner.explain import roofline
from flashtune.tuner.models import ModelAttention

# `standard_attention` holds its scores, what becomes of them, and half as much in 16 bits at once.
SCORE_COPIES = 2.5
LSE_BYTES = 4


class Phase(enum.StrEnum):
    """What a model does: PREFILL attends from a whole prompt to itself, DECODE from one new token to all."""

    PREFILL = "prefill"
    DECODE = "decode"


class Way(msgspec.Struct, frozen=True):
    """One way to compute a model's attention at one length.

    Attributes:
        memory: What one layer needs beside queries, keys and values, in bytes: its output, and scratch.
        traffic: HBM bytes that its order of loops moves, of all layers: what L2 is sure to hold counts once.
        bound_ms: The least time of all layers on the target, in ms, by its peak rates and the bytes that
            cannot be saved: whatever the unfused computation writes and reads again, and for a fused one
            each input and output once.
        bound_by: `matrix units`, `softmax` or `memory`.
    """

    memory: int
    traffic: int
    bound_ms: float
    bound_by: str


class Point(msgspec.Struct, frozen=True):
    """A model's attention at one length.

    Attributes:
        seqlen: Tokens of a sequence.
        kv_bytes: Keys and values of all layers and sequences, one after the other without gaps.
        standard: The unfused computation, which writes its scores.
        flash: The kernel that dispatch would use.
        family: That kernel's family.
        speedup: By the rooflines, how many times as long the unfused computation takes.
    """

    seqlen: int
    kv_bytes: int
    standard: Way
    flash: Way
    family: str
    speedup: float


class Overview(msgspec.Struct, frozen=True):
    """A model's attention in one phase on one target, over sequence length."""

    model: str
    phase: Phase
    target: str
    layers: int
    batch: int
    dtype: Dtype
    points: tuple[Point, ...]


def overviews(
    attention: ModelAttention, problems: tuple[Problem, ...], phase: Phase, target: Target, db: str | None
) -> tuple[Overview, ...]:
    """A model's attention, one overview for each batch size and type.

    Args:
        attention: The model's attention.
        problems: Its prefill at each length, batch size and type.
        phase: What the model does.
        target: The GPU.
        db: The database whose selections count, None for the default one.

    Raises:
        UsageError: The model is an encoder and does not decode.
        ProblemError: No family computes the problem on this target.
        StoreError: The database cannot be read.
    """
    if phase is Phase.DECODE and not attention.causal:
        raise UsageError(f"{attention.name} is an encoder and does not decode: pass --phase prefill")
    groups: dict[tuple[int, Dtype], list[Point]] = {}
    for problem in problems:
        posed = problem if phase is Phase.PREFILL else msgspec.structs.replace(problem, seqlen_q=1)
        points = groups.setdefault((problem.batch, problem.dtype), [])
        points.append(_point(posed, attention.layers, target, db))
    return tuple(
        Overview(
            attention.name,
            phase,
            target.name,
            attention.layers,
            batch,
            dtype,
            tuple(sorted(points, key=lambda point: point.seqlen)),
        )
        for (batch, dtype), points in groups.items()
    )


def _point(problem: Problem, layers: int, target: Target, db: str | None) -> Point:
    chosen = choose(problem, target, db)
    items = chosen.family.hbm_items(problem, chosen.config, target)
    rows = problem.batch * problem.heads * problem.seqlen_q
    out = rows * problem.value_head_dim * problem.out_dtype.itemsize
    moved = sum(item.bytes for item in items)
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    # Values of 8 bits are transposed into memory of their own size.
    scratch = keys * problem.value_head_dim if problem.dtype.is_quantized else 0
    memory = out + rows * LSE_BYTES + scratch
    flash = _way(problem, memory, moved, problem.minimal_bytes(), layers, target)
    standard = _standard(problem, out, layers, target)
    both = problem.head_dim + problem.value_head_dim
    return Point(
        seqlen=problem.seqlen_kv,
        kv_bytes=layers * keys * both * problem.dtype.itemsize,
        standard=standard,
        flash=flash,
        family=chosen.family.name,
        speedup=standard.bound_ms / flash.bound_ms,
    )


def _standard(problem: Problem, out: int, layers: int, target: Target) -> Way:
    """It computes what the mask hides too, and takes quantised inputs as 16 bits."""
    dtype = Dtype.BF16 if problem.dtype.is_quantized else problem.dtype
    plain = msgspec.structs.replace(problem, dtype=dtype)
    traffic = sum(item.bytes for item in standard_hbm_items(plain))
    full = msgspec.structs.replace(plain, causal=Causal.NONE)
    return _way(full, out + int(SCORE_COPIES * score_bytes(plain)), traffic, traffic, layers, target)


def _way(problem: Problem, memory: int, traffic: int, least_traffic: int, layers: int, target: Target) -> Way:
    least = roofline(problem, target)
    times = {
        "matrix units": layers * least.matrix_ms,
        "softmax": layers * least.softmax_ms,
        "memory": layers * least_traffic / (target.hbm_bandwidth * 1e6),
    }
    bound_by = max(times, key=lambda name: times[name])
    return Way(memory, layers * traffic, times[bound_by], bound_by)
