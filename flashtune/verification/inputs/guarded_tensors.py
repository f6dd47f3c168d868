"""Tensors with poisoned surroundings, with exactly the alignment that a kernel may assume.

The memory between and around the rows of a tensor is NaN. Reads there make the result NaN, and writes there
change the poison.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.kernel import MAX_INT32, Alignment
from flashtune.core.layouts import TORCH_DTYPES, Layout
from flashtune.core.problem import Dtype

# NaNs that arithmetic does not produce, so that they differ from a NaN that a kernel wrote. 8-bit floats have
# no such choice of NaNs, but only inputs have 8 bits.
POISON = {torch.int8: 0x7F, torch.int16: 0x7FE5, torch.int32: 0x7FE5CAFE, torch.int64: 0x7FE5CAFE7FE5CAFE}
# A workspace may hold floats of 8 or 32 bits, for which these bits are NaNs, or a counter, for which they are
# too large. No workspace holds 16-bit floats: kernels may write the halves of this value, two common NaNs.
WORKSPACE_POISON = 0x7FFF7FFF
# Integer dtypes by the bytes of an element.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Rows of poison on each side: the most rows by which the largest tile could overrun.
GUARD_ROWS = 256
GRANULE = 64
# Largest guard around a log-sum-exp or a workspace, in elements. Smaller tensors have a guard of their size.
MAX_FLAT_GUARD = 2**16
# Elements that are checked at a time.
PART_ELEMENTS = 2**28


class Role(enum.IntEnum):
    """The role of a tensor for a kernel. Each has its own poison, because arithmetic propagates NaNs."""

    INPUT = 0
    OUTPUT = 1
    WORKSPACE = 2


class Guarded(NamedTuple):
    """A tensor inside a larger, poisoned buffer."""

    buffer: Tensor  # The whole allocation, one-dimensional.
    view: Tensor  # [batch, heads, seqlen, head_dim], last dimension contiguous.
    role: Role  # Role, which determines the poison.
    # Rows of each head after the view that the kernel also gets, but that no sequence uses.
    behind: int = 0

    @property
    def given(self) -> Tensor:
        """The view as the kernel gets it, with the unused rows after it."""
        if not self.behind:
            return self.view
        batch, heads, rows, *width = self.view.shape
        shape = (batch, heads, rows + self.behind, *width)
        return self.view.as_strided(shape, self.view.stride(), self.view.storage_offset())

    def without(self, behind: int) -> Guarded:
        """Returns the tensor with so many of its last rows excluded from the view."""
        rows = self.view.shape[2] - behind
        return self._replace(view=self.view[:, :, :rows], behind=behind)

    @property
    def bits(self) -> Tensor:
        """The buffer as integers."""
        return bits_of(self.buffer)

    @property
    def poison(self) -> int:
        """The poison as an integer."""
        return WORKSPACE_POISON if self.role is Role.WORKSPACE else POISON[self.bits.dtype] - self.role


def guarded(
    shape: tuple[int, ...],
    dtype: Dtype | torch.dtype,
    alignment: Alignment,
    layout: Layout,
    device: torch.device,
    role: Role,
    *,
    spare: int = 0,
    far: bool = False,
) -> Guarded:
    """Returns a poisoned tensor of exactly the given alignment class.

    Args:
        shape: [batch, heads, seqlen, head_dim].
        dtype: Element dtype. 8-bit integers and booleans have no NaN and are surrounded by 127.
        alignment: 16: all strides are multiples of 16. 8: multiples of 8, but not of 16. 1: unaligned.
        layout: Order of heads and positions, one of `DENSE_LAYOUTS`.
        device: Device of the tensor.
        role: Role of the tensor for the kernel.
        spare: Widens each row by this many alignment steps, so that tensors have different strides.
        far: Whether the tensor spans more than 2^31 elements.
    """
    batch, heads, seqlen, head_dim = shape
    row = _row_stride(head_dim, alignment, spare)
    stride_h, stride_s = (seqlen * row, row) if layout is Layout.BHSD else (row, heads * row)
    stride_b = heads * seqlen * row
    if far:
        stride_b *= MAX_INT32 // (stride_b * max(1, batch - 1)) + 1
        if batch == 1:
            # A varlen batch has one batch index, so its heads are spread instead.
            stride_h *= MAX_INT32 // (stride_h * max(1, heads - 1)) + 1
    guard = -(-GUARD_ROWS * stride_s // GRANULE) * GRANULE + (1 if alignment is Alignment.ANY else 0)
    extent = (batch - 1) * stride_b + (heads - 1) * stride_h + (seqlen - 1) * stride_s + row
    element = TORCH_DTYPES[dtype] if isinstance(dtype, Dtype) else dtype
    buffer = torch.empty(guard + extent + GUARD_ROWS * stride_s, dtype=element, device=device)
    tensor = Guarded(buffer, buffer.as_strided(shape, (stride_b, stride_h, stride_s, 1), guard), role)
    poison(tensor)
    return tensor


def _row_stride(head_dim: int, alignment: Alignment, spare: int) -> int:
    step = int(alignment)
    steps = -(-head_dim // step) + spare
    if alignment is Alignment.SIXTEEN:
        return steps * step
    # An odd number of steps excludes the next higher alignment class.
    return (steps | 1) * step


def guarded_flat(
    shape: tuple[int, ...], device: torch.device, role: Role, dtype: torch.dtype = torch.float32
) -> Guarded:
    """Returns a contiguous, aligned, poisoned tensor: log-sum-exp, workspace, scales or bias gradient."""
    size = math.prod(shape)
    guard = -(-min(size + GUARD_ROWS, MAX_FLAT_GUARD) // GRANULE) * GRANULE
    buffer = torch.empty(size + 2 * guard, dtype=dtype, device=device)
    tensor = Guarded(buffer, buffer[guard : guard + size].view(shape), role)
    poison(tensor)
    return tensor


def guarded_integers(values: Tensor, hostile: int) -> Guarded:
    """Returns a copy of 1D or 2D int32 values, with each row surrounded by the number `hostile`."""
    rows, columns = values.reshape(-1, values.shape[-1]).shape
    stride = columns + 1 + GRANULE // 8 if values.dim() > 1 else columns
    buffer = torch.full((2 * GRANULE + rows * stride,), hostile, dtype=torch.int32, device=values.device)
    strides = (stride, 1) if values.dim() > 1 else (1,)
    view = buffer.as_strided(tuple(values.shape), strides, GRANULE)
    view.copy_(values)
    return Guarded(buffer, view, Role.INPUT)


def bits_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as integers, in which zeros of different sign, and NaNs, differ."""
    return tensor.view(BITS[tensor.element_size()])


def nonzero(tensor: Tensor) -> Tensor:
    """Returns the number of nonzero elements, including NaNs, as a scalar. Loads no comparison kernels."""
    return tensor.bool().sum()


def poison(tensor: Guarded) -> None:
    """Fills a tensor and its surroundings with its poison."""
    tensor.bits.fill_(tensor.poison)


def stray_writes(tensor: Guarded) -> Tensor:
    """Returns the number of written elements around a tensor, a scalar. Poisons the tensor itself."""
    bits_of(tensor.view).fill_(tensor.poison)
    # Integer differences wrap around, and are zero only for equal integers. They take as much memory as the
    # tensor, so tensors beyond 2^31 elements are checked in parts.
    parts = tensor.bits.split(PART_ELEMENTS)
    return functools.reduce(torch.add, (nonzero(part - tensor.poison) for part in parts))


def checksum(tensors: Iterable[Guarded]) -> Tensor:
    """Returns the sum of the bits of each tensor and its surroundings, [tensors] in int64."""
    buffers = [tensor.bits for tensor in tensors]
    sums = torch.empty(len(buffers), dtype=torch.int64, device=buffers[0].device)
    for index, bits in enumerate(buffers):
        torch.sum(bits, 0, dtype=torch.int64, out=sums[index])
    return sums
