"""`PlainProblem`: the shape, element type, causal mask and pass of one attention computation."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

Extent = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
HeadDim = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Direction(enum.StrEnum):
    """The pass: forward computes the output, backward the gradients of the inputs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Dtype(enum.StrEnum):
    """The element type of queries, keys and values. Outputs have it too, except for `e4m3` and `tf32`.

    Tensors of `tf32` are float32. Products may use 10 bits of their mantissas, as torch's setting
    `torch.backends.cuda.matmul.fp32_precision` allows.

    `e4m3` is an 8-bit float of 4 exponent and 3 mantissa bits (torch's `float8_e4m3fn`), for quantised
    tensors with a scale for each head.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    TF32 = "tf32"
    E4M3 = "e4m3"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {Dtype.E4M3: 1, Dtype.FP32: 4, Dtype.TF32: 4}.get(self, 2)

    @property
    def is_float32(self) -> bool:
        """Whether tensors of this type are float32."""
        return self in (Dtype.FP32, Dtype.TF32)

    @property
    def stored(self) -> Dtype:
        """The type of the elements in memory."""
        return Dtype.FP32 if self.is_float32 else self

    @property
    def is_quantized(self) -> bool:
        """Whether tensors of this type come with scales."""
        return self is Dtype.E4M3

    @property
    def out(self) -> Dtype:
        """The element type of the output. 8 bits are not precise enough for it."""
        return Dtype.BF16 if self.is_quantized else self.stored


class Causal(enum.StrEnum):
    """The causal mask and its alignment.

    Top-left: query i sees keys 0..i, as with SDPA's `is_causal`. Bottom-right: query i sees keys
    0..i + seqlen_kv - seqlen_q, as in flash_attn, so that the last query sees every key.
    """

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


# Defaults are omitted from stored problems, so that older stored problems still load with the same hash. The
# mask and the direction were always stored.
class PlainProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One attention computation without features."""

    dtype: Dtype  # Element type of q, k and v. The output has `dtype.out`.
    head_dim: HeadDim  # Width of queries and keys.
    value_head_dim: HeadDim  # Width of values and outputs.
    heads: Count  # Query heads.
    kv_heads: Count  # Key and value heads; divides `heads`.
    batch: Extent  # Number of sequences.
    seqlen_q: Extent  # Queries per sequence.
    seqlen_kv: Extent  # Keys per sequence.
    # The causal mask and its alignment.
    causal: Causal = msgspec.field(default_factory=lambda: Causal.NONE)
    # Forward or backward pass.
    direction: Direction = msgspec.field(default_factory=lambda: Direction.FORWARD)
