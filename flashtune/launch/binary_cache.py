"""The per-process cache of binaries: each kernel is compiled and loaded once for all shapes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flashtune.core.errors import KernelError
from flashtune.launch.forward import Binary, compile_binary
from flashtune.launch.launcher import load

if TYPE_CHECKING:
    import torch

    from flashtune.core.kernel import Kernel
    from flashtune.core.target import Target


def binary_of(kernel: Kernel, target: Target, device: torch.device) -> Binary:
    """Returns a kernel's binary, loaded onto a device.

    Raises:
        KernelError: The kernel does not compile or load, or failed earlier.
    """
    found = _compiled(kernel, target, device)
    if isinstance(found, KernelError):
        raise found
    return found


@functools.cache
def _compiled(kernel: Kernel, target: Target, device: torch.device) -> Binary | KernelError:
    """Returns a binary or the error. An error is cached too, so that no new shape repeats the attempt."""
    try:
        binary = compile_binary(kernel, target)
        # Load before the self-check, so that any compiler that Triton runs for the launch has finished.
        for part in filter(None, binary):
            load(part, device)
    except KernelError as error:
        # Without the traceback, which would keep the caller's tensors alive.
        return type(error)(str(error))
    return binary
