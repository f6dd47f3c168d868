"""Orders of the dimensions of a call's tensors, and their element types in torch."""

import enum
import functools

import torch
from torch import Tensor

from flashtune.core.problem import Dtype, KvDtype


class Layout(enum.StrEnum):
    """The order of a tensor's dimensions.

    bhsd  [batch, heads, seqlen, head_dim], and pages as [pages, heads, page_size, head_dim].
    bshd  [batch, seqlen, heads, head_dim], and pages as [pages, page_size, heads, head_dim].
    thd   [tokens, heads, head_dim]: varlen sequences without padding.
    bhd   [batch, heads, head_dim]: one token per sequence.
    """

    BHSD = "bhsd"
    BSHD = "bshd"
    THD = "thd"
    BHD = "bhd"

    def heads_first(self, tensor: Tensor) -> Tensor:
        """Returns a view of a tensor of this layout as [batch, heads, seqlen, head_dim], for kernels."""
        if self is Layout.BSHD:
            return tensor.transpose(1, 2)
        if self is Layout.THD:
            return tensor.transpose(0, 1).unsqueeze(0)
        return tensor.unsqueeze(2) if self is Layout.BHD else tensor

    def as_given(self, tensor: Tensor) -> Tensor:
        """Returns a view in this layout of a tensor that kernels take; the inverse of `heads_first`."""
        if self is Layout.BSHD:
            return tensor.transpose(1, 2)
        if self is Layout.THD:
            return tensor.squeeze(0).transpose(0, 1)
        return tensor.squeeze(2) if self is Layout.BHD else tensor

    def shape(self, batch: int, heads: int, seqlen: int, head_dim: int) -> tuple[int, ...]:
        """Returns the shape of a tensor in this layout. With varlen sequences `seqlen` counts all tokens."""
        if self is Layout.BSHD:
            return batch, seqlen, heads, head_dim
        if self is Layout.THD:
            return seqlen, heads, head_dim
        return (batch, heads, head_dim) if self is Layout.BHD else (batch, heads, seqlen, head_dim)


# All layouts. torch.compile of torch 2.11 does not trace `tuple(Layout)`.
LAYOUTS = tuple(Layout)
# Layouts of calls in which all sequences have the same length.
DENSE_LAYOUTS = (Layout.BHSD, Layout.BSHD)


def memory_order(tensor: Tensor) -> str:
    """Returns the memory order of the dimensions of a [batch, heads, seqlen, head_dim] tensor.

    The outermost dimension is first. The last dimension counts as the innermost, as in torch's
    `flex_attention`. The order of the shape itself is "".
    """
    strides, dims = tensor.stride(), Layout.BHSD.value
    order = "".join(sorted(dims[:-1], key=lambda dim: -strides[dims.index(dim)])) + dims[-1]
    return "" if order == dims else order


@functools.lru_cache(1024)
def strides_of(shape: tuple[int, ...], order: str) -> tuple[int, ...]:
    """Returns the strides of a dense [batch, heads, seqlen, head_dim] tensor in a memory order."""
    return torch.empty_permuted(shape, [*map(Layout.BHSD.index, order)], device="meta").stride()


def in_memory_order(tensor: Tensor, order: str) -> Tensor:
    """Returns a [batch, heads, seqlen, head_dim] tensor in a memory order. It is copied if it has another."""
    if tensor.stride() == strides_of(tensor.shape, order):
        return tensor
    copy = tensor.permute([*map(Layout.BHSD.index, order)]).clone(memory_format=torch.contiguous_format)
    return copy.permute([*map(order.index, Layout.BHSD)])


TORCH_DTYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.TF32: torch.float32,
    Dtype.E4M3: torch.float8_e4m3fn,
}
# Element types of quantised caches with queries that are not quantised.
STORED_DTYPES = {KvDtype.E4M3: torch.float8_e4m3fn, KvDtype.INT8: torch.int8}
DTYPES = {torch_dtype: dtype.stored for dtype, torch_dtype in TORCH_DTYPES.items()}
KV_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in STORED_DTYPES.items()}
# The largest magnitudes in a quantised cache. The range of int8 is symmetric.
LARGEST_STORED = {KvDtype.E4M3: 448.0, KvDtype.INT8: 127.0}
# Floating types in which torch can compute.
WIDE_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
