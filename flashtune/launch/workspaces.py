"""Workspaces of launches, and allocations with little host time. This code runs in every call.

A launch takes the memory of its workspaces from a list of its stream and returns it after its kernels are
queued. Until then no other thread has it, and later launches on the stream run after these kernels. Launches
in a CUDA graph allocate their memory instead: then it belongs to the graph, and no other launch writes it.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

# torch's compiler uses these too. They bypass the dispatcher, which takes a third of the host time.
from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
    _empty_strided_cpu,  # pyright: ignore[reportAttributeAccessIssue]
    _empty_strided_cuda,  # pyright: ignore[reportAttributeAccessIssue]
)

Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# Whether the current stream records a CUDA graph. Only builds of torch for GPUs have the function.
capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)

FLOAT32 = 4
# Alignment of each workspace in bytes. Separate allocations have at least this alignment.
BORDER = 512
# The minimum and the maximum of memory that is kept for later launches. Larger workspaces are allocated in
# each call.
MIN_KEPT_BYTES = 2**20
MAX_KEPT_BYTES = 2**25


class Memory(NamedTuple):
    """Memory for workspaces."""

    tensor: Tensor
    address: int
    size: int


# Memory that no launch holds, by device and stream.
Kept = defaultdict[torch.device, defaultdict[int, list[Memory]]]


def kept_memory() -> Kept:
    """Returns a new set of memory, which launches may share."""
    return defaultdict(lambda: defaultdict(list))


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns float32 scratch memory for one call. A kernel writes it before it reads it."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def allocator(like: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that allocates a tensor with the shape, strides and type of a meta tensor.

    A GPU must be the current device when the function is called.
    """
    allocate = _empty_strided_cuda if device.type == "cuda" else _empty_strided_cpu
    return functools.partial(allocate, tuple(like.shape), like.stride(), like.dtype)


class Workspaces:
    """The workspaces of all kernels of a launch."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        device: torch.device,
        allocate: Allocate = allocate_workspace,
        kept: Kept | None = None,
    ) -> None:
        """Plans one piece of memory for all workspaces. With a custom `allocate`, each has its own.

        `shapes` has the shape of each workspace, by name. `allocate` returns the memory of one workspace.
        `kept` has the memory that other launches left, by default none.
        """
        self.names = tuple(shapes)
        self._shapes = tuple(shapes.values())
        self._device = device
        self._allocate = None if allocate is allocate_workspace else allocate
        self._offsets: list[int] = []
        # By the address of memory that is kept, of which there is little.
        self._addresses: dict[int, list[int]] = {}
        self._size = 0
        for shape in self._shapes:
            self._offsets.append(self._size)
            self._size += -(-math.prod(shape) * FLOAT32 // BORDER) * BORDER
        # A device's hash costs host time, so calls do not look it up.
        self._kept = (kept_memory() if kept is None else kept)[device]
        if self._allocate is None:
            self._new = allocator(torch.empty(self._size, dtype=torch.uint8, device="meta"), device)

    def take(self, stream: int) -> tuple[Sequence[int], object, Callable[[object], None]]:
        """Returns all addresses, their memory and the function to which the launch returns the memory.

        `stream` is the device's current one. Hold the memory until all kernels are queued.
        """
        if self._allocate is not None:
            made = [self._allocate(shape, self._device) for shape in self._shapes]
            return [workspace.data_ptr() for workspace in made], made, _freed
        if self._size > MAX_KEPT_BYTES or capturing():
            tensor = self._new()
            return [*map(tensor.data_ptr().__add__, self._offsets)], tensor, _freed
        kept = self._kept[stream]
        try:
            memory = kept.pop()
        except IndexError:
            memory = None
        if memory is None or memory.size < self._size:
            memory = _made(self._size, self._device, stream)
        addresses = self._addresses.get(memory.address)
        if addresses is None:
            addresses = [*map(memory.address.__add__, self._offsets)]
            self._addresses[memory.address] = addresses
        return addresses, memory, kept.append  # type: ignore[return-value]


def _freed(memory: object) -> None:
    """Does nothing: the memory is freed when the launch returns."""


def _made(size: int, device: torch.device, stream: int) -> Memory:
    """Allocates memory of a stream that outlasts a call.

    It is done in another thread. In this one, a CUDA graph's pool may serve allocations although nothing is
    captured, and nothing may stay in it: `torch.compile` runs a function so before it captures it.
    """
    size = max(MIN_KEPT_BYTES, 1 << (size - 1).bit_length())

    def allocate() -> Tensor:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
            return torch.empty(size, dtype=torch.uint8, device=device)

    with ThreadPoolExecutor(1) as thread:
        tensor = thread.submit(allocate).result()
    return Memory(tensor, tensor.data_ptr(), size)
