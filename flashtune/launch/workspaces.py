"""Workspaces of launches, and prototypes for allocations. This code runs in every call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# Bound once. It is the fastest allocation from Python.
empty_like = torch.empty_like

FLOAT32 = 4
# Alignment of each workspace in bytes. Separate allocations have at least this alignment.
BORDER = 512


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns float32 scratch memory for one call. A kernel writes it before it reads it."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def prototype(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous prototype for `empty_like`, which takes half the host time of `empty`.

    The prototype has no memory: never read or write it.
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
        """Plans one allocation for all workspaces. With a custom `allocate`, each has its own."""
        self._shapes = shapes
        self._allocate = None if allocate is allocate_workspace else allocate
        self._offsets: list[int] = []
        self._size = 0
        for shape in shapes:
            self._offsets.append(self._size)
            self._size += -(-math.prod(shape) * FLOAT32 // BORDER) * BORDER
        self._like: Tensor | None = None

    def __call__(self, tensor: Tensor) -> tuple[Sequence[Tensor], list[int]]:
        """Returns tensors that keep the memory alive until all kernels are queued, and all addresses."""
        if not self._shapes:
            return (), []
        if self._allocate is not None:
            made = [self._allocate(shape, tensor.device) for shape in self._shapes]
            return made, [one.data_ptr() for one in made]
        like = self._like
        if like is None:
            like = self._like = prototype((self._size // FLOAT32,), torch.float32, tensor.device)
        memory = empty_like(like)
        address = memory.data_ptr()
        return (memory,), [*map(address.__add__, self._offsets)]

    def tensors(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Returns the workspaces as tensors of their shapes."""
        if self._allocate is not None:
            return [*held]
        starts = [offset // FLOAT32 for offset in self._offsets]
        places = zip(starts, self._shapes, strict=True)
        return [held[0][start : start + math.prod(shape)].view(shape) for start, shape in places]
