"""The inputs of a kernel in addition to q, k and v: scales, slopes, lengths, block tables and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ExtraInputs(NamedTuple):
    """The extra inputs of a call, in the order in which kernels take them. None means absent.

    Attributes:
        q_scale: Scale of a quantised q: float32 [batch, heads], positive; None means 1.
        k_scale: Likewise of k, [batch, kv_heads]. With a quantised cache and q that is not quantised, k_scale
            and v_scale are float32 [pages, kv_heads] of any strides. A scale per tensor or head is expanded.
        v_scale: Likewise of v.
        slopes: ALiBi slopes, float32 [batch, heads], any stride of batch.
        bias: Additive bias in q's type, or a bool mask: [batch, heads, seqlen_q, seqlen_kv], last dimension
            contiguous, others of any stride.
        sinks: A learned logit per head without a value: float32 [heads].
        prefix: Number of keys that all queries of a sequence see: int32 [batch].
        cu_seqlens_q: Offsets of the queries of each sequence, and their end: int32 [batch + 1].
        cu_seqlens_kv: Likewise of varlen keys that are not in pages.
        seqlens_kv: Number of keys of each sequence: int32 [batch].
        block_table: The pages of each sequence, in order: int32 [batch, pages of the longest].
        seed: The seed of dropout: int64 [1].
        softcap: Scores s become softcap · tanh(s / softcap).
        dropout: The fraction of probabilities that are dropped.
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
        """The scales of q, k and v."""
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def presence(self) -> tuple[bool, ...]:
        """Whether each input is present."""
        return tuple(value is not None for value in self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The present tensors, in order."""
        return tuple(tensor for tensor in self.optional_tensors if tensor is not None)

    @property
    def optional_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of `TENSORS`."""
        return self[: -len(NUMBERS)]  # type: ignore[return-value]

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The inputs that are passed by value, in the order of `NUMBERS`."""
        return self[-len(NUMBERS) :]  # type: ignore[return-value]


# Inputs that are passed by value, after the scale. They are last in `ExtraInputs`.
NUMBERS = ("softcap", "dropout")
TENSORS = ExtraInputs._fields[: -len(NUMBERS)]
NO_EXTRA_INPUTS = ExtraInputs()
