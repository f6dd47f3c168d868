"""`Problem`: what must be computed, with nothing about how."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from flashtune.errors import ProblemError

MAX_HEAD_DIM = 256
Extent = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
HeadDim = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Direction(enum.StrEnum):
    """Which computation of attention."""

    FORWARD = "forward"


class Dtype(enum.StrEnum):
    """The element type of queries, keys and values; of outputs too, but for `e4m3`.

    `e4m3` is an 8-bit float of 4 exponent and 3 mantissa bits (torch's `float8_e4m3fn`), for tensors
    that were quantised with a scale for each head.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    E4M3 = "e4m3"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {Dtype.E4M3: 1, Dtype.FP32: 4}.get(self, 2)

    @property
    def is_quantized(self) -> bool:
        """Whether tensors of this type come with scales."""
        return self is Dtype.E4M3

    @property
    def out(self) -> Dtype:
        """The element type of what attention of such tensors gives: 8 bits are too few for it."""
        return Dtype.BF16 if self.is_quantized else self


class Causal(enum.StrEnum):
    """Which keys a query may see.

    With the diagonal aligned top-left, query i sees keys 0..i (SDPA's `is_causal`); bottom-right,
    keys 0..i + seqlen_kv - seqlen_q (flash_attn's, so that the last query sees every key).
    """

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attention computation.

    Attributes:
        dtype: Element type of q, k and v; out has `out_dtype`.
        head_dim: Width of queries and keys.
        value_head_dim: Width of values and outputs.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        batch: Sequences.
        seqlen_q: Queries of a sequence.
        seqlen_kv: Keys of a sequence.
        causal: The causal mask and its alignment.
        direction: Which computation.
    """

    dtype: Dtype
    head_dim: HeadDim
    value_head_dim: HeadDim
    heads: Count
    kv_heads: Count
    batch: Extent
    seqlen_q: Extent
    seqlen_kv: Extent
    causal: Causal = Causal.NONE
    direction: Direction = Direction.FORWARD

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} query heads do not divide among {self.kv_heads} KV heads: "
                "make heads a multiple of kv_heads"
            )

    @property
    def key(self) -> str:
        """One line that names the problem, unique and stable: the database's key."""
        value_dim = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return (
            f"{self.direction}_{self.dtype}_d{self.head_dim}{value_dim}_h{self.heads}x{self.kv_heads}"
            f"_b{self.batch}_q{self.seqlen_q}_k{self.seqlen_kv}_{self.causal}"
        )

    @property
    def out_dtype(self) -> Dtype:
        """Element type of the output."""
        return self.dtype.out

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def diagonal(self) -> int:
        """Query i sees keys up to i + diagonal, where the mask is causal."""
        return self.seqlen_kv - self.seqlen_q if self.causal is Causal.BOTTOM_RIGHT else 0

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask keeps."""
        if self.causal is Causal.NONE:
            return self.seqlen_q * self.seqlen_kv
        # Row i sees clamp(i + diagonal + 1, 0, seqlen_kv) keys: a ramp between two flats.
        first = max(0, -self.diagonal)
        full_from = min(self.seqlen_q, max(first, self.seqlen_kv - self.diagonal - 1))
        ramp = max(0, full_from - first)
        ramp_sum = ramp * (first + self.diagonal + 1) + ramp * (ramp - 1) // 2
        return ramp_sum + max(0, self.seqlen_q - full_from) * self.seqlen_kv

    def flops(self) -> int:
        """Floating-point operations of the two products over the visible pairs."""
        return 2 * self.batch * self.heads * self.visible_pairs() * (self.head_dim + self.value_head_dim)

    def nominal_flops(self) -> int:
        """The field's convention: 4·B·H·Sq·Sk·D, halved when causal. All reported TFLOP/s use it."""
        both = self.head_dim + self.value_head_dim
        full = 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_kv * both
        return full if self.causal is Causal.NONE else full // 2

    def minimal_bytes(self) -> int:
        """HBM bytes when each input is read once and each output written once."""
        rows = self.batch * self.heads * self.seqlen_q
        keys = self.batch * self.kv_heads * self.seqlen_kv
        read = rows * self.head_dim + keys * (self.head_dim + self.value_head_dim)
        return read * self.dtype.itemsize + rows * self.value_head_dim * self.out_dtype.itemsize
