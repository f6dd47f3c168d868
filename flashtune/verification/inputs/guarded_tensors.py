"""Tensors whose surroundings are poisoned, with exactly the alignment that a kernel was told of.

Whatever lies between and around the rows of a tensor is NaN: a kernel that reads there shows it,
and one that writes there is caught by its traces.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.kernel import MAX_INT32, Alignment
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Dtype

if TYPE_CHECKING:
    from torch import Tensor

# NaNs that arithmetic does not produce, so that they are told from a NaN that a kernel wrote. 8 bits have
# room for no choice of them, but inputs alone have 8 bits.
POISON = {torch.int8: 0x7F, torch.int16: 0x7FE5, torch.int32: 0x7FE5CAFE, torch.int64: 0x7FE5CAFE7FE5CAFE}
# A workspace may hold 8-bit floats: with all bits set, each byte is a NaN as well.
WORKSPACE_POISON = -1
# Integers as wide as an element, by its bytes.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Rows of poison on either side: as many as the largest tile could run over.
GUARD_ROWS = 256
GRANULE = 64
# Around a log-sum-exp or a workspace: as much as the tensor itself, up to a large tile.
MAX_FLAT_GUARD = 2**16
# Elements that are looked through at a time.
PART_ELEMENTS = 2**28


class Role(enum.IntEnum):
    """What a tensor is to a kernel: each has a poison of its own, since arithmetic hands NaNs on."""

    INPUT = 0
    OUTPUT = 1
    WORKSPACE = 2


class Layout(enum.StrEnum):
    """How batch, heads and positions lie in memory."""

    BHSD = "bhsd"
    BSHD = "bshd"


class Guarded(NamedTuple):
    """A tensor inside a larger, poisoned buffer.

    Attributes:
        buffer: The whole allocation, one-dimensional.
        view: [batch, heads, seqlen, head_dim], last dimension contiguous.
        role: Which poison surrounds it.
        behind: Rows of each head behind the view that a kernel is given too, and that are nobody's.
    """

    buffer: Tensor
    view: Tensor
    role: Role
    behind: int = 0

    @property
    def given(self) -> Tensor:
        """The view as a kernel takes it, with the rows behind."""
        if not self.behind:
            return self.view
        batch, heads, rows, *width = self.view.shape
        shape = (batch, heads, rows + self.behind, *width)
        return self.view.as_strided(shape, self.view.stride(), self.view.storage_offset())

    def without(self, behind: int) -> Guarded:
        """The same with so many of its last rows behind the view."""
        rows = self.view.shape[2] - behind
        return self._replace(view=self.view[:, :, :rows], behind=behind)

    @property
    def bits(self) -> Tensor:
        """The buffer as integers."""
        return bits_of(self.buffer)

    @property
    def poison(self) -> int:
        """The integer that the poison is."""
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
    """A poisoned tensor of an alignment class, and of no better one.

    Args:
        shape: [batch, heads, seqlen, head_dim].
        dtype: Element type; 8-bit integers and booleans, which know no NaN, are surrounded by 127.
        alignment: 16: all strides are multiples of 16; 8: of 8, and not of 16; 1: nothing is aligned.
        layout: Order of heads and positions.
        device: Where it lies.
        role: What it is to the kernel.
        spare: Widens each row by this many steps of its class, so that tensors differ in strides.
        far: Spread the tensor over more than 2^31 elements.
    """
    batch, heads, seqlen, head_dim = shape
    row = _row_stride(head_dim, alignment, spare)
    stride_h, stride_s = (seqlen * row, row) if layout is Layout.BHSD else (row, heads * row)
    stride_b = heads * seqlen * row
    if far:
        stride_b *= MAX_INT32 // (stride_b * max(1, batch - 1)) + 1
        if batch == 1:
            # One batch of packed rows: its heads lie apart.
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
    # An odd number of steps keeps the next better class out.
    return (steps | 1) * step


def guarded_flat(
    shape: tuple[int, ...], device: torch.device, role: Role, dtype: torch.dtype = torch.float32
) -> Guarded:
    """A contiguous, aligned, poisoned tensor: a log-sum-exp, a workspace, scales, a bias's gradient."""
    size = math.prod(shape)
    guard = -(-min(size + GUARD_ROWS, MAX_FLAT_GUARD) // GRANULE) * GRANULE
    buffer = torch.empty(size + 2 * guard, dtype=dtype, device=device)
    tensor = Guarded(buffer, buffer[guard : guard + size].view(shape), role)
    poison(tensor)
    return tensor


def guarded_integers(values: Tensor, hostile: int) -> Guarded:
    """A copy of int32 values of one or two dimensions, each row surrounded by a hostile number."""
    rows, columns = values.reshape(-1, values.shape[-1]).shape
    stride = columns + 1 + GRANULE // 8 if values.dim() > 1 else columns
    buffer = torch.full((2 * GRANULE + rows * stride,), hostile, dtype=torch.int32, device=values.device)
    strides = (stride, 1) if values.dim() > 1 else (1,)
    view = buffer.as_strided(tuple(values.shape), strides, GRANULE)
    view.copy_(values)
    return Guarded(buffer, view, Role.INPUT)


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers, which tell zeros of either sign and NaNs apart."""
    return tensor.view(BITS[tensor.element_size()])


def nonzero(tensor: Tensor) -> Tensor:
    """How many elements are not zero, NaNs among them: a scalar. Comparisons would be further kernels."""
    return tensor.bool().sum()


def poison(tensor: Guarded) -> None:
    """Fills a tensor and its surroundings with the NaN that nobody computes."""
    tensor.bits.fill_(tensor.poison)


def stray_writes(tensor: Guarded) -> Tensor:
    """How many elements around a tensor were written, a scalar. Poisons the tensor itself."""
    bits_of(tensor.view).fill_(tensor.poison)
    # Differences of integers wrap around, and are zero of equal ones alone. They take as much memory again,
    # so that tensors beyond 2^31 elements are gone through in parts.
    parts = tensor.bits.split(PART_ELEMENTS)
    return functools.reduce(torch.add, (nonzero(part - tensor.poison) for part in parts))


def checksum(tensors: Iterable[Guarded]) -> Tensor:
    """Sums of the bits of tensors and their surroundings, [tensors] in int64."""
    buffers = [tensor.bits for tensor in tensors]
    sums = torch.empty(len(buffers), dtype=torch.int64, device=buffers[0].device)
    for index, bits in enumerate(buffers):
        torch.sum(bits, 0, dtype=torch.int64, out=sums[index])
    return sums
