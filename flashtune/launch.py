"""A compiled kernel bound to the strides and lengths of one problem: what a call costs is here.

The grid and the integer arguments are worked out once by the rendered module's own `launch_plan`;
a call then passes pointers, the scale and those integers straight to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from flashtune.compilation import compile_kernel, interpreting, load_module
from flashtune.descriptors import DescriptorArguments, typed, without_memory
from flashtune.launches import (
    DescriptorLaunch,
    DeviceLaunch,
    InterpreterLaunch,
    QuantizedLaunch,
    SideLaunch,
    divided,
)
from flashtune.quantization import E4M3, unit_scales
from flashtune.queueing import interpreted_queue, queue_of
from flashtune.side import NO_SIDE, Side
from flashtune.workspaces import allocate_workspace

if TYPE_CHECKING:
    from torch import Tensor
    from triton.compiler import CompiledKernel

    from flashtune.kernel import Kernel
    from flashtune.target import Target
    from flashtune.workspaces import Allocate


class Binary(NamedTuple):
    """A kernel's binary, and those of its prologue and epilogue where it has them."""

    kernel: CompiledKernel
    prologue: CompiledKernel | None = None
    epilogue: CompiledKernel | None = None


class Launch(Protocol):
    """Runs one kernel on tensors of the shapes and strides that it was bound to.

    q, k, v and out are [batch, heads, seqlen, head_dim]; lse is [batch, heads, seqlen_q] in
    float32 and contiguous, or None where the kernel does not write it. `scale` is not negative. Packed
    tensors are of one batch, and pages [pages, kv_heads, page_size, head_dim].
    `side` holds the side inputs that the problem names; kernels ignore others.
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
        side: Side = ...,
    ) -> None:
        """Fills `out`, and `lse` where there is one."""
        ...


def compile_binary(kernel: Kernel, target: Target) -> Binary:
    """All that a launch of a kernel runs, compiled for a target.

    Raises:
        KernelError: The compiler refused it.
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
    side: Side = NO_SIDE,
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
        side: Side inputs like those to come: of these too strides and shapes decide.
        compiled: The kernel's binary where it is at hand, so that many shapes share one.
        allocate: Makes the workspaces; verification hands out poisoned ones.

    Raises:
        KernelError: The kernel does not compile, or cannot be loaded on this GPU.
    """
    module = load_module(kernel)
    # Scales of quantised queries lie as they always do: nothing is planned by them.
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
            return SideLaunch(queue, epilogue, kernel.side, workspaces, allocate)
        return DeviceLaunch(queue, workspaces, allocate)
    arguments = None
    if kernel.takes_descriptors:
        # The kernel reads what the prologue wrote of v.
        values = typed(allocate_workspace(workspaces[0], torch.device("meta")), v) if prologue else v
        patterns = module.descriptors(*map(without_memory, (q, k, values, out)))
        arguments = DescriptorArguments(patterns, binary.kernel.metadata.tensordesc_meta)
        if q.dtype is not E4M3:
            return DescriptorLaunch(queue, arguments, kernel.side, epilogue, workspaces, allocate)
    return QuantizedLaunch(queue, prologue, unit_scales(q), workspaces, allocate, arguments)
