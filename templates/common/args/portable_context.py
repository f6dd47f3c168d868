"""Values for the templates of portable families, forward and backward."""

from typing import Any

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.common.args.feature_context import FeatureContext, feature_context
from flashtune.templates.common.model.sram import Chunk
from flashtune.templates.common.precision import InputPrecision, fixed_precision
from flashtune.templates.family import Context


class PortableContext(Context, frozen=True, kw_only=True):
    """The values for the templates of all portable families."""

    dtype: Dtype
    causal: Causal
    head_dim: int
    value_head_dim: int
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    widths: tuple[int, ...]
    alignment: Alignment
    index_bits: int
    lse: bool
    features: FeatureContext
    fixed_precision: InputPrecision

    @property
    def wide_offsets(self) -> bool:
        """Whether offsets of tensors need 64 bits."""
        return self.index_bits > 32

    @property
    def is_fp32(self) -> bool:
        """Whether queries are in fp32."""
        return self.dtype.is_float32


def portable_fields(
    problem: Problem,
    specialization: Specialization,
    qk_chunks: tuple[Chunk, ...],
    v_chunks: tuple[Chunk, ...],
    block_n: int = 0,
) -> dict[str, Any]:
    """Returns the fields of a `PortableContext`, by name.

    `qk_chunks` are the tiles of queries' and keys' columns, `v_chunks` those of values' columns. A tile has
    `block_n` keys, or 0 if no template asks for pages.
    """
    return {
        "dtype": problem.dtype.stored,
        "causal": problem.causal,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "qk_chunks": qk_chunks,
        "v_chunks": v_chunks,
        "widths": tuple(sorted({chunk.width for chunk in (*qk_chunks, *v_chunks)})),
        "alignment": specialization.alignment,
        "index_bits": specialization.index_bits,
        "lse": specialization.lse,
        "features": feature_context(problem, block_n),
        "fixed_precision": fixed_precision(problem),
    }
