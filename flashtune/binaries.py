"""The binaries of this process: each kernel is compiled once, however many shapes it serves."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flashtune.errors import KernelError
from flashtune.launch import Binary, compile_binary

if TYPE_CHECKING:
    import torch

    from flashtune.kernel import Kernel
    from flashtune.target import Target


def binary_of(kernel: Kernel, target: Target, device: torch.device) -> Binary:
    """A kernel's binary for a device.

    Raises:
        KernelError: It does not compile, or did not when it was asked for before.
    """
    found = _compiled(kernel, target, device)
    if isinstance(found, KernelError):
        raise found
    return found


@functools.cache
def _compiled(kernel: Kernel, target: Target, device: torch.device) -> Binary | KernelError:
    """A binary, or why there is none: what failed once is not compiled again for each new shape."""
    del device  # a binary is loaded onto the device that first launches it, so each has its own
    try:
        return compile_binary(kernel, target)
    except KernelError as error:
        # Without its frames, which would keep a caller's tensors alive.
        return KernelError(str(error))
