"""Scratch memory of launches, and tensors to allocate others like: what a call allocates is here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# Bound once: the cheapest allocation that there is from Python.
empty_like = torch.empty_like

FLOAT32 = 4
# Each workspace begins on a border of so many bytes, as allocations of their own do at least.
BORDER = 512


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 scratch memory that a kernel writes before it reads; allocated per call."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def prototype(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor to give to `empty_like`, which takes half the host time of an allocation by shape.

    It has no memory: never read or write it.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


class Workspaces:
    """The workspaces of all kernels of a launch, bound to the device of its first call."""

    __slots__ = ("_allocate", "_like", "_offsets", "_shapes", "_size")

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...] = (), allocate: Allocate = allocate_workspace
    ) -> None:
        """Plans one allocation for all; with an `allocate` of somebody's own each has one."""
        self._shapes = shapes
        self._allocate = None if allocate is allocate_workspace else allocate
        self._offsets: list[int] = []
        self._size = 0
        for shape in shapes:
            self._offsets.append(self._size)
            self._size += -(-math.prod(shape) * FLOAT32 // BORDER) * BORDER
        self._like: Tensor | None = None

    def __call__(self, beside: Tensor) -> tuple[Sequence[Tensor], list[int]]:
        """What holds the memory until all kernels are queued, and the address of each workspace.

        Args:
            beside: A tensor on the device.
        """
        if not self._shapes:
            return (), []
        if self._allocate is not None:
            made = [self._allocate(shape, beside.device) for shape in self._shapes]
            return made, [one.data_ptr() for one in made]
        like = self._like
        if like is None:
            like = self._like = prototype((self._size // FLOAT32,), torch.float32, beside.device)
        memory = empty_like(like)
        address = memory.data_ptr()
        return (memory,), [*map(address.__add__, self._offsets)]

    def tensors(self, held: Sequence[Tensor]) -> list[Tensor]:
        """The workspaces as tensors of their shapes."""
        if self._allocate is not None:
            return [*held]
        starts = [offset // FLOAT32 for offset in self._offsets]
        places = zip(starts, self._shapes, strict=True)
        return [held[0][start : start + math.prod(shape)].view(shape) for start, shape in places]
