"""Launches: a kernel with the grid, workspaces and integers of one problem, called once for every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashtune.descriptors import typed
from flashtune.side import NO_SIDE, NUMBERS, Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flashtune.descriptors import DescriptorArguments

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# A scale of zero asks for plain averages; as a factor of -inf it would give NaN.
LEAST_SCALE = 1e-30


def divided(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of side inputs, apart: of the tensors, and of what is passed by value behind the scale."""
    tensors = tuple(name for name in names if name not in NUMBERS)
    return tensors, names[len(tensors) :]


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 scratch memory that a kernel writes before it reads; allocated per call."""
    return torch.empty(shape, dtype=torch.float32, device=device)


class InterpreterLaunch:
    """The kernel as Triton's interpreter runs it on the CPU, block by block."""

    def __init__(
        self,
        queue: Callable[..., None],
        epilogue: Callable[..., None] | None,
        names: tuple[str, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """`names` are those of the side inputs that the kernel takes."""
        self._queue = queue
        self._epilogue = epilogue
        self._names, self._numbers = divided(names)
        self._allocate = allocate
        self._workspaces = workspaces

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        side: Side = NO_SIDE,
    ) -> None:
        """Runs every block in turn."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        row_lse = out if lse is None else lse
        beside = [getattr(side, name) for name in self._names]
        numbers = [getattr(side, name) for name in self._numbers]
        self._queue(q, k, v, out, row_lse, *beside, *workspaces, max(scale, LEAST_SCALE), *numbers)
        if self._epilogue is not None:
            self._epilogue(out, row_lse, *workspaces)


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
        side: Side = NO_SIDE,
    ) -> None:
        """Queues the kernel on its device's current stream."""
        del side  # this kernel reads nothing else
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
    """The binary of a kernel whose tensors are passed as descriptors; all else goes by address."""

    __slots__ = ("_allocate", "_arguments", "_epilogue", "_names", "_numbers", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Callable[[tuple[Any, ...]], None],
        arguments: DescriptorArguments,
        names: tuple[str, ...] = (),
        epilogue: Callable[[tuple[Any, ...]], None] | None = None,
        workspaces: tuple[tuple[int, ...], ...] = (),
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """`names` are those of the side inputs that the kernel takes."""
        self._queue = queue
        self._arguments = arguments
        self._names, self._numbers = divided(names)
        self._epilogue = epilogue
        self._workspaces, self._allocate = workspaces, allocate

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        side: Side = NO_SIDE,
    ) -> None:
        """Queues the kernel, and its epilogue if there is one, on the device's current stream."""
        row_lse = out.data_ptr() if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        beside = [getattr(side, name).data_ptr() for name in self._names]
        numbers = [getattr(side, name) for name in self._numbers]
        tensors = self._arguments((q, k, v, out))
        if self._epilogue is None:
            self._queue((*tensors, row_lse, *beside, scale, *numbers))
            return
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        pointers = [workspace.data_ptr() for workspace in workspaces]
        self._queue((*tensors, row_lse, *beside, *pointers, scale, *numbers))
        self._epilogue((out.data_ptr(), row_lse, *pointers))


class SideLaunch:
    """The binary of a kernel that reads more than q, k and v, or that has an epilogue."""

    __slots__ = ("_allocate", "_epilogue", "_names", "_numbers", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Callable[[tuple[Any, ...]], None],
        epilogue: Callable[[tuple[Any, ...]], None] | None,
        names: tuple[str, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """`names` are those of the side inputs that the kernel takes."""
        self._queue = queue
        self._epilogue = epilogue
        self._names, self._numbers = divided(names)
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
        side: Side = NO_SIDE,
    ) -> None:
        """Queues all kernels on their device's current stream."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        pointers = [workspace.data_ptr() for workspace in workspaces]
        beside = [getattr(side, name).data_ptr() for name in self._names]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        numbers = [getattr(side, name) for name in self._numbers]
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        tensors = (q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse)
        self._queue((*tensors, *beside, *pointers, scale, *numbers))
        if self._epilogue is not None:
            self._epilogue((address, row_lse, *pointers))


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
        side: Side = NO_SIDE,
    ) -> None:
        """Queues both kernels on their device's current stream."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        pointers = [workspace.data_ptr() for workspace in workspaces]
        if self._prologue is not None:
            self._prologue((v.data_ptr(), *pointers))
        factors = [(self._ones if factor is None else factor).data_ptr() for factor in side.scales]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        if self._arguments is None:
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), address)
            self._queue((*addresses, row_lse, *factors, *pointers, scale))
            return
        tensors = self._arguments((q, k, typed(workspaces[0], v), out))
        self._queue((*tensors, row_lse, *factors, scale))
