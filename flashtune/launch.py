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
    allocate_workspace,
)
from flashtune.quantization import E4M3, Scales, unit_scales
from flashtune.queueing import Queue

if TYPE_CHECKING:
    from torch import Tensor
    from triton.compiler import CompiledKernel

    from flashtune.kernel import Kernel
    from flashtune.launches import Allocate
    from flashtune.target import Target


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
