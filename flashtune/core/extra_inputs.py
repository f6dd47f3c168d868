"""What a kernel reads beside q, k and v: scales, slopes, lengths, block tables and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Side(NamedTuple):
    """Side inputs of a call; None is what it does not have. Kernels take them in this order.

    Attributes:
        q_scale: Float32 [batch, heads], positive: factors of a quantised q; None is 1.
        k_scale: Likewise of k, [batch, kv_heads]. Of a quantised cache beside 16-bit queries the scales of k
            and v are float32 [pages, kv_heads], any strides: of one tensor or of heads alone, expanded.
        v_scale: Likewise of v.
        slopes: ALiBi's, float32 [batch, heads], any stride of batch.
        bias: Added to the scores, or what may be seen: [batch, heads, seqlen_q, seqlen_kv] in q's type
            or bool, last dimension contiguous, others of any stride.
        sinks: A score for each head that takes weight and has no value: float32 [heads].
        prefix: Keys that all queries of a sequence see: int32 [batch].
        cu_seqlens_q: Where the queries of packed sequences begin, and the last ends: int32 [batch + 1].
        cu_seqlens_kv: Likewise of keys that are packed and not in pages.
        seqlens_kv: How many keys each sequence has: int32 [batch].
        block_table: The pages of each sequence, in order: int32 [batch, pages of the longest].
        seed: What decides which weights are dropped: int64 [1].
        softcap: Scores s become softcap · tanh(s / softcap).
        dropout: The share of weights that are dropped.
    """

    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    prefix: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    seqlens_kv: Tensor | None = None
    block_table: Tensor | None = None
    seed: Tensor | None = None
    softcap: float | None = None
    dropout: float | None = None

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of q, k and v."""
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def presence(self) -> tuple[bool, ...]:
        """Which of all there are."""
        return tuple(value is not None for value in self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that there are, in order."""
        return tuple(tensor for tensor in self.optional_tensors if tensor is not None)

    @property
    def optional_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of `TENSORS`."""
        return self[: -len(NUMBERS)]  # type: ignore[return-value]

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """What is passed by value, in the order of `NUMBERS`."""
        return self[-len(NUMBERS) :]  # type: ignore[return-value]


# What is passed by value, behind the scale, is last in `Side`.
NUMBERS = ("softcap", "dropout")
TENSORS = Side._fields[: -len(NUMBERS)]
NO_SIDE = Side()
