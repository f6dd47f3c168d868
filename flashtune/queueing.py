"""A binary on one device with the grid and the integers of one problem, ready to be queued."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime._allocation import _allocator

from flashtune.compilation import first_line
from flashtune.descriptors import without_making
from flashtune.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


_interpreting = threading.Lock()


class Queue:
    """Passes a binary and its values straight to the driver."""

    __slots__ = ("_current", "_device", "_grid", "_head", "_integers", "_run", "_scratch", "_stream")

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], integers: tuple[int, ...], device: torch.device
    ) -> None:
        """Loads the binary onto the device.

        Raises:
            KernelError: It cannot be loaded there.
        """
        from triton.runtime import driver

        with torch.cuda.device(device):
            try:
                # Reading `run` loads the binary onto the current device.
                run: Callable[..., None] = compiled.run
            except Exception as error:
                raise KernelError(first_line(error)) from error
        self._run = without_making(run) if getattr(compiled.metadata, "tensordesc_meta", None) else run
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._current: Callable[[], int] = torch.cuda.current_device
        # Only GPU drivers have it, and only on a GPU is this class made.
        self._stream: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
        self._grid = (*grid, 1, 1)[:3]
        # No launch metadata and no hooks: they are a profiler's, and cost a call each.
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)
        self._integers = integers
        self._scratch = compiled.metadata.global_scratch_size > 0

    def __call__(self, values: tuple[Any, ...]) -> None:
        """Queues the kernel on its device's current stream. `values` come before its integers."""
        if self._current() != self._device:
            # The binary belongs to its device's context, which must be the current one.
            with torch.cuda.device(self._device):
                self(values)
            return
        stream = self._stream(self._device)
        if not self._scratch:
            self._run(*self._grid, stream, *self._head, *values, *self._integers)
            return
        # Descriptors made on the device live in scratch memory, from torch's stream-ordered pool.
        previous = _allocator.set(_allocate_scratch)
        try:
            self._run(*self._grid, stream, *self._head, *values, *self._integers)
        finally:
            _allocator.reset(previous)


def interpreted_queue(
    module: Any, entry: str, grid: tuple[int, ...], integers: tuple[int, ...]
) -> Callable[..., None]:
    """A kernel of a rendered module, run by Triton's interpreter on the CPU. `integers` come last."""
    launch = getattr(module, entry)[grid]

    def queue(*values: Any) -> None:
        # While a kernel runs, the interpreter has parts of Triton replaced, of all threads.
        with _interpreting:
            launch(*values, *integers)

    return queue


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes and uses the current stream, as the launch does
    return torch.empty(size, dtype=torch.int8, device="cuda")
