"""The binaries of this process: each kernel is compiled and loaded once, however many shapes it serves."""

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
    """A kernel's binary, loaded onto a device.

    Raises:
        KernelError: It does not compile or load, or did not when it was asked for before.
    """
    found = _compiled(kernel, target, device)
    if isinstance(found, KernelError):
        raise found
    return found


@functools.cache
def _compiled(kernel: Kernel, target: Target, device: torch.device) -> Binary | KernelError:
    """A binary, or why there is none: what failed once is not tried again for each new shape."""
    try:
        binary = compile_binary(kernel, target)
        # Before the kernel is checked: whatever compilers Triton runs for it have run by then.
        for part in filter(None, binary):
            load(part, device)
    except KernelError as error:
        # Without its frames, which would keep a caller's tensors alive.
        return type(error)(str(error))
    return binary
