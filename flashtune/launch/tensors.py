"""The tensors of a launch, by name."""

from typing import NamedTuple

from torch import Tensor


class ForwardTensors(NamedTuple):
    """The tensors of a forward pass, as [batch, heads, seqlen, head_dim] of any strides.

    Varlen tensors have a batch of one, and pages are [pages, kv_heads, page_size, head_dim].
    """

    q: Tensor  # Queries, [batch, heads, seqlen_q, head_dim].
    k: Tensor  # Keys, [batch, kv_heads, seqlen_kv, head_dim].
    v: Tensor  # Values, [batch, kv_heads, seqlen_kv, value_head_dim].
    out: Tensor  # The output, to be written: [batch, heads, seqlen_q, value_head_dim].
    # Its log-sum-exp, to be written: float32 [batch, heads, seqlen_q], contiguous. None if the kernel does
    # not write it.
    lse: Tensor | None = None

    @property
    def planned(self) -> tuple[Tensor, ...]:
        """The tensors whose strides and lengths determine the launch."""
        return self[:4]


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass, as [batch, heads, seqlen, head_dim] of any strides."""

    q: Tensor  # Queries, [batch, heads, seqlen_q, head_dim].
    k: Tensor  # Keys, [batch, kv_heads, seqlen_kv, head_dim].
    v: Tensor  # Values, [batch, kv_heads, seqlen_kv, value_head_dim].
    out: Tensor  # The output of the forward pass, [batch, heads, seqlen_q, value_head_dim].
    lse: Tensor  # Its log-sum-exp, float32 [batch, heads, seqlen_q], contiguous, natural log.
    dout: Tensor  # The gradient of `out`, of the same shape.
    dq: Tensor  # The gradient of q, to be written.
    dk: Tensor  # The gradient of k, to be written.
    dv: Tensor  # The gradient of v, to be written.
    dlse: Tensor | None = None  # The gradient of `lse`, of the same shape, or None for zeros.
    # The gradient of an additive bias in q's type, to be written: [batch, heads, seqlen_q, seqlen_kv].
    dbias: Tensor | None = None
    # The gradient of the ALiBi slopes, to be written: float32 [batch, heads].
    dslopes: Tensor | None = None
    # The gradient of the sinks by sequence, to be written: float32 [batch, heads]. Portable kernels do not
    # write it.
    dsinks: Tensor | None = None
    # The gradients of captured tensors or of their loads, to be written: float32, see
    # `flashtune.core.features.table_gradients`.
    dtables: Tensor | None = None

    @property
    def planned(self) -> tuple[Tensor, ...]:
        """The tensors whose strides and lengths determine the launch, and whose addresses must be aligned."""
        return self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv
