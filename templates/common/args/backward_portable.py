"""Shared code of portable backward families: unsupported problems, and values for templates."""

from __future__ import annotations

from typing import Any

import msgspec

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Causal, Dtype, Feature, Problem
from flashtune.templates.common.args.feature_context import FeatureContext, asked_of
from flashtune.templates.common.model.sram import Chunk, head_chunks
from flashtune.templates.family import Context

# Elements of a tensor that a program of the prologue or epilogue holds, and its warps.
STEP_NUMBERS = 8192
STEP_WARPS = 4
MIN_ROWS = 16


class PortableContext(Context, frozen=True):
    """The values for the templates of both families, in addition to their configs."""

    dtype: Dtype
    causal: Causal
    head_dim: int
    value_head_dim: int
    asks: FeatureContext
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    widths: tuple[int, ...]
    delta_chunk: Chunk
    delta_rows: int
    delta_warps: int
    random_workspace: int
    alignment: Alignment
    index_bits: int
    lse: bool


def refusal(name: str, problem: Problem) -> str | None:
    """Returns why the family of this name does not compute a problem, None if it does."""
    if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
        return f"{name} takes head dims up to {MAX_HEAD_DIM}"
    if problem.dtype.is_quantized:
        return f"{name} takes no {problem.dtype}"
    if {Feature.VARLEN, Feature.BIAS} <= problem.features:
        return f"{name} takes no bias over packed sequences"
    return None


def portable_fields(
    problem: Problem,
    specialization: Specialization,
    chunks: tuple[tuple[Chunk, ...], tuple[Chunk, ...]],
    random_workspace: int,
) -> dict[str, Any]:
    """Returns the fields of a `PortableContext`, by name.

    `chunks` are the tiles of queries' and keys' columns, and those of values' columns. `random_workspace` is
    the index of the workspace with the random words of rows, for dropout.
    """
    qk_chunks, v_chunks = chunks
    delta_chunk = head_chunks(problem.value_head_dim, False)[0]
    common = PortableContext(
        dtype=problem.dtype,
        causal=problem.causal,
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        # The log-sum-exp includes the sinks.
        asks=msgspec.structs.replace(asked_of(problem), sinks=False),
        qk_chunks=qk_chunks,
        v_chunks=v_chunks,
        widths=tuple(sorted({chunk.width for chunk in (*qk_chunks, *v_chunks)})),
        delta_chunk=delta_chunk,
        delta_rows=rows_of_step(delta_chunk),
        delta_warps=STEP_WARPS,
        random_workspace=random_workspace,
        alignment=specialization.alignment,
        index_bits=specialization.index_bits,
        lse=specialization.lse,
    )
    return msgspec.structs.asdict(common)


def rows_of_step(chunk: Chunk) -> int:
    """Returns the rows of such a tile that a program of a prologue or epilogue holds at once."""
    return max(MIN_ROWS, STEP_NUMBERS // chunk.width)
