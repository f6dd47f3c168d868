"""Unsupported problems of portable families, and values for their templates."""

from typing import Any

from flashtune.core.kernel import Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Feature, Problem
from flashtune.templates.common.args.feature_context import feature_values
from flashtune.templates.common.model.sram import Chunk
from flashtune.templates.common.precision import fixed_precision


def portable_values(
    problem: Problem,
    specialization: Specialization,
    chunks: tuple[tuple[Chunk, ...], tuple[Chunk, ...]],
    block_n: int = 0,
) -> dict[str, Any]:
    """Returns the values for the templates of all portable families.

    `chunks` are the tiles of queries' and keys' columns, and those of values' columns. A tile has `block_n`
    keys, or 0 if no template asks for pages.
    """
    qk_chunks, v_chunks = chunks
    return {
        "dtype": problem.dtype.stored,
        "is_fp32": problem.dtype.stored.is_float32,
        "causal": problem.causal,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "qk_chunks": qk_chunks,
        "v_chunks": v_chunks,
        "widths": tuple(sorted({chunk.width for chunk in (*qk_chunks, *v_chunks)})),
        "alignment": specialization.alignment,
        "index_bits": specialization.index_bits,
        "wide_offsets": specialization.index_bits > 32,
        "lse": specialization.lse,
        "features": feature_values(problem, block_n),
        "fixed_precision": fixed_precision(problem),
    }


def refusal(name: str, problem: Problem) -> str | None:
    """Returns why the portable family of this name does not compute a problem, None if it does."""
    if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
        return f"{name} takes head dims up to {MAX_HEAD_DIM}"
    if problem.dtype.is_quantized:
        return f"{name} takes no queries in {problem.dtype}"
    if {Feature.PACKED, Feature.BIAS} <= problem.features:
        return f"{name} takes no bias over packed sequences"
    return None
