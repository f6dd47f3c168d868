"""Launches: a kernel with the grid, workspaces and integers of one problem, called once for every call.

What differs is how tensors are passed: to Triton's interpreter, by address, or by descriptors of the copy
engine; and that quantised inputs bring scales along and have a prologue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashtune.descriptors import typed
from flashtune.quantization import UNSCALED, Scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flashtune.descriptors import DescriptorArguments

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# A scale of zero asks for plain averages; as a factor of -inf it would give NaN.
LEAST_SCALE = 1e-30


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 scratch memory that a kernel writes before it reads; allocated per call."""
    return torch.empty(shape, dtype=torch.float32, device=device)


class InterpreterLaunch:
    """The kernel as Triton's interpreter runs it on the CPU, block by block."""

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        workspaces: tuple[tuple[int, ...], ...],
        integers: tuple[int, ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        self._launch = function[grid]
        self._allocate = allocate
        self._workspaces = workspaces
        self._integers = integers

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        scales: Scales = UNSCALED,
    ) -> None:
        """Runs every block in turn."""
        del scales  # nothing is quantised here
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        row_lse = out if lse is None else lse
        self._launch(q, k, v, out, row_lse, *workspaces, max(scale, LEAST_SCALE), *self._integers)


class DeviceLaunch:
    """The binary, launched without Triton's per-call specialisation."""

    __slots__ = ("_allocate", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Callable[[tuple[Any, ...]], None],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        self._queue = queue
        self._workspaces = workspaces
        self._allocate = allocate

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        scales: Scales = UNSCALED,
    ) -> None:
        """Queues the kernel on its device's current stream."""
        del scales  # nothing is quantised here
        # Addresses instead of tensors: the launcher then asks the driver nothing about them.
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        if not self._workspaces:
            self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, scale))
            return
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        pointers = [workspace.data_ptr() for workspace in workspaces]
        self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, *pointers, scale))


class DescriptorLaunch:
    """The binary of a kernel whose tensors are passed as descriptors."""

    __slots__ = ("_arguments", "_queue")

    def __init__(self, queue: Callable[[tuple[Any, ...]], None], arguments: DescriptorArguments) -> None:
        self._queue = queue
        self._arguments = arguments

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        scales: Scales = UNSCALED,
    ) -> None:
        """Queues the kernel on its device's current stream."""
        del scales  # nothing is quantised here
        row_lse = out.data_ptr() if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        self._queue((*self._arguments((q, k, v, out)), row_lse, scale))


class QuantizedLaunch:
    """The binary for quantised inputs, after its prologue, which fills the workspaces from v."""

    __slots__ = ("_allocate", "_arguments", "_ones", "_prologue", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Callable[[tuple[Any, ...]], None],
        prologue: Callable[[tuple[Any, ...]], None] | None,
        ones: Tensor,
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
        arguments: DescriptorArguments | None = None,
    ) -> None:
        """`ones` stands for the scales of a call that gives none: one or more for each head."""
        self._queue = queue
        self._prologue = prologue
        self._arguments = arguments
        self._ones = ones
        self._workspaces = workspaces
        self._allocate = allocate

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        scales: Scales = UNSCALED,
    ) -> None:
        """Queues both kernels on their device's current stream."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        pointers = [workspace.data_ptr() for workspace in workspaces]
        if self._prologue is not None:
            self._prologue((v.data_ptr(), *pointers))
        factors = [(self._ones if factor is None else factor).data_ptr() for factor in scales]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        if self._arguments is None:
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), address)
            self._queue((*addresses, row_lse, *factors, *pointers, scale))
            return
        tensors = self._arguments((q, k, typed(workspaces[0], v), out))
        self._queue((*tensors, row_lse, *factors, scale))
