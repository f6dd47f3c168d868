"""A compiled kernel bound to the strides and lengths of one problem: what a call costs is here.

The grid and the integer arguments are worked out once by the rendered module's own `launch_plan`;
a call then passes pointers, the scale and those integers straight to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from flashtune.compilation import compile_kernel, interpreting, load_module
from flashtune.descriptors import LEAST_SCALE, DescriptorArguments, DescriptorLaunch, typed, without_memory
from flashtune.quantization import E4M3, UNSCALED, Scales, unit_scales
from flashtune.queueing import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from triton.compiler import CompiledKernel

    from flashtune.kernel import Kernel
    from flashtune.target import Target

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]


class Binary(NamedTuple):
    """A kernel's binary, and that of its prologue where it has one."""

    kernel: CompiledKernel
    prologue: CompiledKernel | None = None


class Launch(Protocol):
    """Runs one kernel on tensors of the shapes and strides that it was bound to.

    q, k, v and out are [batch, heads, seqlen, head_dim]; lse is [batch, heads, seqlen_q] in
    float32 and contiguous, or None where the kernel does not write it. `scale` is not negative.
    `scales` are those of quantised inputs, contiguous; other kernels ignore them.
    Strides are bound, so only addresses are read: a transposed view and its base serve alike.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        scales: Scales = ...,
    ) -> None:
        """Fills `out`, and `lse` where there is one."""
        ...


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 scratch memory that a kernel writes before it reads; allocated per call."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def compile_binary(kernel: Kernel, target: Target) -> Binary:
    """All that a launch of a kernel runs, compiled for a target.

    Raises:
        KernelError: The compiler refused it.
    """
    first = kernel.first
    return Binary(compile_kernel(kernel, target), first and compile_kernel(first, target))


def bind(
    kernel: Kernel,
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    compiled: Binary | None = None,
    allocate: Allocate = allocate_workspace,
) -> Launch:
    """The launch of a kernel for tensors like these: loads, compiles and plans.

    Args:
        kernel: The kernel.
        target: The GPU that it is compiled for.
        q: [batch, heads, seqlen_q, head_dim]; like k, v and out it decides strides and lengths.
        k: [batch, kv_heads, seqlen_kv, head_dim].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
        out: [batch, heads, seqlen_q, value_head_dim].
        compiled: The kernel's binary where it is at hand, so that many shapes share one.
        allocate: Makes the workspaces; verification hands out poisoned ones.

    Raises:
        KernelError: The kernel does not compile, or cannot be loaded on this GPU.
    """
    module = load_module(kernel)
    grid, workspaces, integers = module.launch_plan(q, k, v, out)
    if interpreting():
        return InterpreterLaunch(getattr(module, kernel.entry), grid, workspaces, integers, allocate)
    binary = compiled or compile_binary(kernel, target)
    queue = Queue(binary.kernel, grid, integers, q.device)
    prologue = None
    if binary.prologue is not None:
        first_grid, first_integers = module.prologue_plan(q, k, v, out)
        prologue = Queue(binary.prologue, first_grid, first_integers, q.device)
    if kernel.takes_descriptors:
        # The kernel reads what the prologue wrote of v.
        values = typed(allocate_workspace(workspaces[0], torch.device("meta")), v) if workspaces else v
        patterns = module.descriptors(*map(without_memory, (q, k, values, out)))
        arguments = DescriptorArguments(patterns, binary.kernel.metadata.tensordesc_meta)
        if q.dtype is not E4M3:
            return DescriptorLaunch(queue, arguments)
    else:
        arguments = None
        if q.dtype is not E4M3:
            return DeviceLaunch(queue, workspaces, allocate)
    return QuantizedLaunch(queue, prologue, unit_scales(q), workspaces, allocate, arguments)


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
