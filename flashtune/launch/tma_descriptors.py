"""Descriptors of the copy engine as kernel arguments: made once for an address, then found again.

Making the descriptors of a call takes most of the host time that a call may cost. They depend on
addresses, shapes and strides alone; shapes and strides are bound, and allocators hand out the same
few addresses again and again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

import torch

from flashtune.core.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Addresses of one tensor, and of all together, that are remembered; then all are forgotten.
MOST_ADDRESSES = 512

# Devices whose context is current in a thread, as far as it is known here.
_thread = threading.local()


class DescriptorArguments:
    """What stands for tensors of bound shapes and strides among a kernel's arguments."""

    __slots__ = ("_known", "_patterns", "_together", "at")

    def __init__(
        self, patterns: Sequence[Sequence[TensorDescriptor]], metadata: Sequence[dict[str, Any]]
    ) -> None:
        """Binds shapes and strides.

        Args:
            patterns: For each tensor its descriptors, on tensors of any address; they are kept as
                long as this is, so give them tensors `without_memory`.
            metadata: The compiler's notes on each descriptor, in order.

        Raises:
            KernelError: This Triton makes descriptors in another way.
        """
        _maker()  # what cannot be made is told now, not in the first call
        rest = iter(metadata)
        self._patterns = [[(pattern, next(rest)) for pattern in of_tensor] for of_tensor in patterns]
        self._known: list[dict[int, list[Any]]] = [{} for _ in patterns]
        self._together: dict[tuple[int, ...], list[Any]] = {}
        # The arguments for tensors at these addresses, if such ones came before: one look-up for all.
        self.at: Callable[[tuple[int, ...]], list[Any] | None] = self._together.get

    def made(self, addresses: tuple[int, ...], tensor_of: Callable[[int], Tensor]) -> list[Any]:
        """The arguments for tensors at addresses that `at` does not know together; do not change them.

        Args:
            addresses: Those of all tensors, in order.
            tensor_of: Gives the tensor of a place, where an address is new there; only its address and its
                type are read.
        """
        values: list[Any] = []
        for place, (address, known) in enumerate(zip(addresses, self._known, strict=True)):
            found = known.get(address)
            if found is None:
                tensor = tensor_of(place)
                _make_context_current(tensor.device)
                found = [
                    value
                    for pattern, notes in self._patterns[place]
                    for value in _made(pattern, notes, tensor)
                ]
                if len(known) >= MOST_ADDRESSES:
                    known.clear()
                known[address] = found
            values += found
        if len(self._together) >= MOST_ADDRESSES:
            self._together.clear()
        self._together[addresses] = values
        return values


def _make_context_current(device: torch.device) -> None:
    """The driver makes descriptors in a thread's current context, and autograd's threads begin with none.

    What torch launches first in a thread gives it one.
    """
    known: set[torch.device] = _thread.__dict__.setdefault("devices", set())
    if device not in known:
        torch.zeros(1, device=device)
        known.add(device)


def _made(pattern: TensorDescriptor, notes: dict[str, Any], tensor: Tensor) -> list[Any]:
    """A descriptor as the launcher takes it: the tensor map, then its shape and strides."""
    make, rest = _maker()
    made: list[Any] = make(dataclasses.replace(pattern, base=tensor), notes, *rest)
    return made


@functools.cache
def _maker() -> tuple[Callable[..., Any], tuple[None, ...]]:
    """Triton's own way to make them, and what it is given besides the descriptor and the notes.

    Raises:
        KernelError: This Triton has none under that name.
    """
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError as error:
        raise KernelError(
            "this Triton makes descriptors in a way that flashtune does not know: install one from 3.6 to 3.9"
        ) from error

    # Later releases pass the launch's other arguments too, for descriptors of another kind.
    return make_tensordesc_arg, (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)


def without_making(run: Any) -> Callable[..., None]:
    """A binary's launcher that takes descriptors as they were made before, instead of making them.

    Raises:
        KernelError: This Triton's launcher is built in another way.
    """
    inner = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if inner is None:
        raise KernelError(
            "this Triton launches kernels with descriptors in a way that flashtune does not know"
        )
    launcher = copy.copy(run)
    launcher.launch = inner
    bare: Callable[..., None] = launcher
    return bare


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor's type, shape and strides alone: what is kept of it holds no memory of the GPU."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def typed(workspace: Tensor, like: Tensor) -> Tensor:
    """A workspace, which is allocated in float32, as elements of another tensor's type."""
    return workspace.view(like.dtype)
