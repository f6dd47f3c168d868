"""Forward kernels bound to the strides and lengths of one problem, and their launches.

The rendered module's `launch_plan` computes the grid and the integer arguments once. A call then passes
pointers, the scale and those integers to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, NUMBERS, ExtraInputs
from flashtune.launch.compilation import compile_kernel, interpreting, load_module
from flashtune.launch.launcher import interpreted_queue, queue_of
from flashtune.launch.tma_descriptors import DescriptorArguments, typed, without_memory
from flashtune.launch.workspaces import Workspaces, allocate_workspace
from flashtune.request.quantization import E4M3, unit_scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from triton.compiler import CompiledKernel

    from flashtune.core.kernel import Kernel
    from flashtune.core.target import Target
    from flashtune.launch.launcher import Queue
    from flashtune.launch.tma_descriptors import DescriptorArguments
    from flashtune.launch.workspaces import Allocate


class Binary(NamedTuple):
    """The binaries of a kernel and of its prologue and epilogue, if any."""

    kernel: CompiledKernel
    prologue: CompiledKernel | None = None
    epilogue: CompiledKernel | None = None


class Launch(Protocol):
    """Runs one kernel on tensors of the bound shapes and strides.

    q, k, v and out are [batch, heads, seqlen, head_dim]. lse is contiguous float32 [batch, heads, seqlen_q],
    or None if the kernel does not write it. `scale` is not negative. Varlen tensors have a batch of one, and
    pages are [pages, kv_heads, page_size, head_dim]. `side` has the extra inputs of the problem; kernels
    ignore others. Strides are bound, so a call reads only addresses: a transposed view works like its base.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        side: ExtraInputs = ...,
    ) -> None:
        """Writes `out`, and `lse` if it is given."""
        ...


def compile_binary(kernel: Kernel, target: Target) -> Binary:
    """Returns all binaries for a launch of a kernel on a target.

    Raises:
        KernelError: The compiler failed.
    """
    first, last = (step and compile_kernel(step, target) for step in (kernel.first, kernel.last))
    return Binary(compile_kernel(kernel, target), first, last)


def bind(
    kernel: Kernel,
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    compiled: Binary | None = None,
    allocate: Allocate = allocate_workspace,
) -> Launch:
    """Returns the launch of a kernel for tensors of these shapes: loads, compiles and plans.

    Tensors are [batch, heads, seqlen, head_dim]. They and the extra inputs have the strides and lengths of
    later calls. With `compiled`, many shapes share one binary. Verification allocates poisoned workspaces.

    Raises:
        KernelError: The kernel does not compile, or cannot be loaded on this GPU.
    """
    module = load_module(kernel)
    # Scales of quantised queries have fixed strides, so the plan does not need them.
    planned = () if q.dtype is E4M3 else divided(kernel.side)[0]
    tensors = (q, k, v, out, *(getattr(side, name) for name in planned))
    grid, workspaces, integers = module.launch_plan(*tensors)
    if interpreting():
        queue = interpreted_queue(module, kernel.entry, grid, integers)
        last = kernel.epilogue
        epilogue = interpreted_queue(module, last.entry, *module.epilogue_plan(*tensors)) if last else None
        return InterpreterLaunch(queue, epilogue, kernel.side, workspaces, allocate)
    binary = compiled or compile_binary(kernel, target)
    queue = queue_of(binary.kernel, grid, integers, q.device)
    prologue = epilogue = None
    if binary.prologue is not None:
        first_grid, first_integers = module.prologue_plan(*tensors)
        prologue = queue_of(binary.prologue, first_grid, first_integers, q.device)
    if binary.epilogue is not None:
        last_grid, last_integers = module.epilogue_plan(*tensors)
        epilogue = queue_of(binary.epilogue, last_grid, last_integers, q.device)
    if q.dtype is not E4M3 and not kernel.takes_descriptors:
        if kernel.side or epilogue:
            return ExtraInputsLaunch(queue, epilogue, kernel.side, workspaces, allocate)
        return DeviceLaunch(queue, workspaces, allocate)
    arguments = None
    if kernel.takes_descriptors:
        # The kernel reads the values from the workspace that the prologue fills.
        values = typed(allocate_workspace(workspaces[0], torch.device("meta")), v) if prologue else v
        patterns = module.descriptors(*map(without_memory, (q, k, values, out)))
        arguments = DescriptorArguments(patterns, binary.kernel.metadata.tensordesc_meta)
        if q.dtype is not E4M3:
            return DescriptorLaunch(queue, arguments, kernel.side, epilogue, workspaces, allocate)
    return QuantizedLaunch(queue, prologue, unit_scales(q), workspaces, allocate, arguments)


# A scale of zero means plain averages. As a factor of -inf it would give NaN.
MIN_SCALE = 1e-30


def divided(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of tensors, and those of inputs that are passed by value after the scale."""
    tensors = tuple(name for name in names if name not in NUMBERS)
    return tensors, names[len(tensors) :]


class InterpreterLaunch:
    """The kernel in Triton's interpreter on the CPU, program by program."""

    def __init__(
        self,
        queue: Callable[..., None],
        epilogue: Callable[..., None] | None,
        names: tuple[str, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """Binds the kernel. `names` are the names of its extra inputs."""
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
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        """Runs all programs in turn."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        row_lse = out if lse is None else lse
        extra = [getattr(side, name) for name in self._names]
        numbers = [getattr(side, name) for name in self._numbers]
        self._queue(q, k, v, out, row_lse, *extra, *workspaces, max(scale, MIN_SCALE), *numbers)
        if self._epilogue is not None:
            self._epilogue(out, row_lse, *workspaces)


class DeviceLaunch:
    """The binary, without Triton's specialization in each call."""

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
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        """Queues the kernel on its device's current stream."""
        del side  # this kernel has no extra inputs
        # Pass addresses instead of tensors, so that the launcher does not query the driver about them.
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > MIN_SCALE else MIN_SCALE
        if not self._has_scratch:
            self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, scale))
            return
        _held, pointers = self._workspaces(q)
        self._queue((q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse, *pointers, scale))


class DescriptorLaunch:
    """The binary of a kernel with tensor descriptors. All other tensors are passed as addresses."""

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
        """Binds the kernel. `names` are the names of its extra inputs."""
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
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        """Queues the kernel and its epilogue, if any, on the device's current stream."""
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > MIN_SCALE else MIN_SCALE
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), address
        tensors = self._at(addresses)
        if tensors is None:
            tensors = self._arguments.made(addresses, (q, k, v, out).__getitem__)
        if self._is_plain:
            self._queue((row_lse, scale), tensors)
            return
        extra = [getattr(side, name).data_ptr() for name in self._names]
        numbers = [getattr(side, name) for name in self._numbers]
        if self._epilogue is None:
            self._queue((row_lse, *extra, scale, *numbers), tensors)
            return
        _held, pointers = self._workspaces(q)
        self._queue((row_lse, *extra, *pointers, scale, *numbers), tensors)
        self._epilogue((address, row_lse, *pointers))


class ExtraInputsLaunch:
    """The binary of a kernel with extra inputs or an epilogue."""

    __slots__ = ("_epilogue", "_names", "_numbers", "_queue", "_workspaces")

    def __init__(
        self,
        queue: Queue,
        epilogue: Queue | None,
        names: tuple[str, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate = allocate_workspace,
    ) -> None:
        """Binds the kernel. `names` are the names of its extra inputs."""
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
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        """Queues all kernels on their device's current stream."""
        _held, pointers = self._workspaces(q)
        extra = [getattr(side, name).data_ptr() for name in self._names]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        numbers = [getattr(side, name) for name in self._numbers]
        scale = scale if scale > MIN_SCALE else MIN_SCALE
        tensors = (q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse)
        self._queue((*tensors, *extra, *pointers, scale, *numbers))
        if self._epilogue is not None:
            self._epilogue((address, row_lse, *pointers))


class QuantizedLaunch:
    """The binary for quantised inputs, and its prologue, which fills the workspaces from v."""

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
        """Binds the kernel. `ones` replaces missing scales: at least one for each head."""
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
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        """Queues both kernels on their device's current stream."""
        held, pointers = self._workspaces(q)
        values = v.data_ptr()
        if self._prologue is not None:
            self._prologue((values, *pointers))
        factors = [(self._ones if factor is None else factor).data_ptr() for factor in side.scales]
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        scale = scale if scale > MIN_SCALE else MIN_SCALE
        if self._arguments is None:
            self._queue((q.data_ptr(), k.data_ptr(), values, address, row_lse, *factors, *pointers, scale))
            return
        # The kernel reads the values from the workspace.
        addresses = q.data_ptr(), k.data_ptr(), pointers[0], address
        tensors = self._arguments.at(addresses)
        if tensors is None:
            written = typed(self._workspaces.tensors(held)[0], v)
            tensors = self._arguments.made(addresses, (q, k, written, out).__getitem__)
        self._queue((row_lse, *factors, scale), tensors)
