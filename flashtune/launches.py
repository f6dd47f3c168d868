"""Launches: a kernel with the grid, workspaces and integers of one problem, called once for every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtune.descriptors import typed
from flashtune.side import NO_SIDE, NUMBERS, Side
from flashtune.workspaces import Workspaces, allocate_workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flashtune.descriptors import DescriptorArguments
    from flashtune.queueing import Queue
    from flashtune.workspaces import Allocate

# A scale of zero asks for plain averages; as a factor of -inf it would give NaN.
LEAST_SCALE = 1e-30


def divided(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of side inputs, apart: of the tensors, and of what is passed by value behind the scale."""
    tensors = tuple(name for name in names if name not in NUMBERS)
    return tensors, names[len(tensors) :]


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

    __slots__ = ("_has_scratch", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Queue,
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        self._queue = queue
        self._has_scratch = bool(workspaces)
        self._workspaces = Workspaces(workspaces, allocate)

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
        if not self._has_scratch:
            self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, scale))
            return
        _held, pointers = self._workspaces(q)
        self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, *pointers, scale))


class DescriptorLaunch:
    """The binary of a kernel whose tensors are passed as descriptors; all else goes by address."""

    __slots__ = ("_arguments", "_at", "_epilogue", "_is_plain", "_names", "_numbers", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Queue,
        arguments: DescriptorArguments,
        names: tuple[str, ...] = (),
        epilogue: Queue | None = None,
        workspaces: tuple[tuple[int, ...], ...] = (),
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """`names` are those of the side inputs that the kernel takes."""
        self._queue = queue
        self._arguments, self._at = arguments, arguments.at
        self._names, self._numbers = divided(names)
        self._is_plain = not names and epilogue is None
        self._epilogue = epilogue
        self._workspaces = Workspaces(workspaces, allocate)

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
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), address
        tensors = self._at(addresses)
        if tensors is None:
            tensors = self._arguments.made(addresses, (q, k, v, out).__getitem__)
        if self._is_plain:
            self._queue((row_lse, scale), tensors)
            return
        beside = [getattr(side, name).data_ptr() for name in self._names]
        numbers = [getattr(side, name) for name in self._numbers]
        if self._epilogue is None:
            self._queue((row_lse, *beside, scale, *numbers), tensors)
            return
        _held, pointers = self._workspaces(q)
        self._queue((row_lse, *beside, *pointers, scale, *numbers), tensors)
        self._epilogue((address, row_lse, *pointers))


class SideLaunch:
    """The binary of a kernel that reads more than q, k and v, or that has an epilogue."""

    __slots__ = ("_epilogue", "_names", "_numbers", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Queue,
        epilogue: Queue | None,
        names: tuple[str, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """`names` are those of the side inputs that the kernel takes."""
        self._queue = queue
        self._epilogue = epilogue
        self._names, self._numbers = divided(names)
        self._workspaces = Workspaces(workspaces, allocate)

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
        _held, pointers = self._workspaces(q)
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

    __slots__ = ("_arguments", "_ones", "_prologue", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Queue,
        prologue: Queue | None,
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
        self._workspaces = Workspaces(workspaces, allocate)

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
        held, pointers = self._workspaces(q)
        values = v.data_ptr()
        if self._prologue is not None:
            self._prologue((values, *pointers))
        factors = [(self._ones if factor is None else factor).data_ptr() for factor in side.scales]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        if self._arguments is None:
            self._queue((q.data_ptr(), k.data_ptr(), values, address, row_lse, *factors, *pointers, scale))
            return
        # The kernel reads the values where the prologue wrote them.
        addresses = q.data_ptr(), k.data_ptr(), pointers[0], address
        tensors = self._arguments.at(addresses)
        if tensors is None:
            written = typed(self._workspaces.tensors(held)[0], v)
            tensors = self._arguments.made(addresses, (q, k, written, out).__getitem__)
        self._queue((row_lse, *factors, scale), tensors)
