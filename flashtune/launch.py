"""A compiled kernel bound to the strides and lengths of one problem: what a call costs is here.

The grid and the integer arguments are worked out once by the rendered module's own `launch_plan`;
a call then passes pointers, the scale and those integers straight to the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from triton.runtime._allocation import _allocator

from flashtune.compilation import compile_kernel, first_line, interpreting, load_module
from flashtune.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from triton.compiler import CompiledKernel

    from flashtune.kernel import Kernel
    from flashtune.target import Target

    Allocate = Callable[[tuple[int, ...], torch.device], Tensor]

# A scale of zero asks for plain averages; as a factor of -inf it would give NaN.
LEAST_SCALE = 1e-30


class Launch(Protocol):
    """Runs one kernel on tensors of the shapes and strides that it was bound to.

    q, k, v and out are [batch, heads, seqlen, head_dim]; lse is [batch, heads, seqlen_q] in
    float32 and contiguous, or None where the kernel does not write it. `scale` is not negative.
    Strides are bound, so only addresses are read: a transposed view and its base serve alike.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
    ) -> None:
        """Fills `out`, and `lse` where there is one."""
        ...


def allocate_workspace(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float32 scratch memory that a kernel writes before it reads; allocated per call."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def bind(
    kernel: Kernel,
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    compiled: CompiledKernel | None = None,
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
    compiled = compiled or compile_kernel(kernel, target)
    return DeviceLaunch(compiled, grid, workspaces, integers, q.device, allocate)


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
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
    ) -> None:
        """Runs every block in turn."""
        workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
        row_lse = out if lse is None else lse
        self._launch(q, k, v, out, row_lse, *workspaces, max(scale, LEAST_SCALE), *self._integers)


class DeviceLaunch:
    """The binary, launched without Triton's per-call specialisation."""

    __slots__ = (
        "_allocate",
        "_current",
        "_device",
        "_grid",
        "_head",
        "_integers",
        "_run",
        "_scratch",
        "_stream",
        "_workspaces",
    )

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        workspaces: tuple[tuple[int, ...], ...],
        integers: tuple[int, ...],
        device: torch.device,
        allocate: Allocate = allocate_workspace,
    ) -> None:
        from triton.runtime import driver

        with torch.cuda.device(device):
            try:
                # Reading `run` loads the binary onto the current device.
                self._run: Callable[..., None] = compiled.run
            except Exception as error:
                raise KernelError(first_line(error)) from error
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._current: Callable[[], int] = torch.cuda.current_device
        # Only GPU drivers have it, and only on a GPU is this class made.
        self._stream: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
        self._grid = (*grid, 1, 1)[:3]
        # No launch metadata and no hooks: they are a profiler's, and cost a call each.
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)
        self._integers = integers
        self._workspaces = workspaces
        self._allocate = allocate
        self._scratch = compiled.metadata.global_scratch_size > 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float
    ) -> None:
        """Queues the kernel on its device's current stream."""
        if self._current() != self._device:
            # The binary belongs to its device's context, which must be the current one.
            with torch.cuda.device(self._device):
                self(q, k, v, out, lse, scale)
            return
        # Addresses instead of tensors: the launcher then asks the driver nothing about them.
        address = out.data_ptr()
        row_lse = address if lse is None else lse.data_ptr()
        pointers: tuple[int, ...] = (q.data_ptr(), k.data_ptr(), v.data_ptr(), address, row_lse)
        if self._workspaces:
            workspaces = [self._allocate(shape, q.device) for shape in self._workspaces]
            pointers += tuple(workspace.data_ptr() for workspace in workspaces)
        stream = self._stream(self._device)
        scale = scale if scale > LEAST_SCALE else LEAST_SCALE
        if not self._scratch:
            self._run(*self._grid, stream, *self._head, *pointers, scale, *self._integers)
            return
        # Descriptors made on the device live in scratch memory, from torch's stream-ordered pool.
        previous = _allocator.set(_allocate_scratch)
        try:
            self._run(*self._grid, stream, *self._head, *pointers, scale, *self._integers)
        finally:
            _allocator.reset(previous)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes and uses the current stream, as the launch does
    return torch.empty(size, dtype=torch.int8, device="cuda")
