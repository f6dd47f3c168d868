"""TMA descriptors as kernel arguments, cached by address.

The creation of descriptors would take most of a call's host time. A descriptor depends only on address,
shape and strides. Shapes and strides are bound, and allocators reuse a few addresses.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtune.core.errors import KernelError

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The largest number of cached addresses, per tensor and in combination. A full cache is cleared.
MAX_ADDRESSES = 512

# Returns the kernel arguments for the descriptors of one tensor at an address.
Make = Callable[[int], list[Any]]

# Devices known to have a current context in this thread.
_thread = threading.local()


class DescriptorArguments:
    """The kernel arguments for described tensors of bound shapes and strides."""

    __slots__ = ("_known", "_makers", "_together", "at")

    def __init__(self, makers: Sequence[Make]) -> None:
        """Binds the functions that make the descriptors of each tensor, in order."""
        self._makers = makers
        self._known: list[dict[int, list[Any]]] = [{} for _ in makers]
        self._together: dict[tuple[int, ...], tuple[Any, ...]] = {}
        # Returns the arguments for a known combination of addresses, with one look-up for all.
        self.at: Callable[[tuple[int, ...]], tuple[Any, ...] | None] = self._together.get

    def made(self, addresses: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
        """Returns the arguments for addresses that `at` does not know in combination.

        `addresses` are those of all tensors, in order.
        """
        values: list[Any] = []
        for address, cached, make in zip(addresses, self._known, self._makers, strict=True):
            descriptors = cached.get(address)
            if descriptors is None:
                _make_context_current(device)
                descriptors = make(address)
                if len(cached) >= MAX_ADDRESSES:
                    cached.clear()
                cached[address] = descriptors
            values += descriptors
        if len(self._together) >= MAX_ADDRESSES:
            self._together.clear()
        self._together[addresses] = together = tuple(values)
        return together


def makers_of(
    patterns: Sequence[Sequence[TensorDescriptor]], metadata: Sequence[dict[str, Any]]
) -> list[Make]:
    """Returns the functions that make the descriptors of each tensor by Triton.

    `patterns` are the descriptors of each tensor, on tensors of any address. The functions keep them, so pass
    tensors from `without_memory`. `metadata` is the compiler's for each descriptor, in order.
    """
    make, rest = _maker(), iter(metadata)

    def maker(described: list[tuple[TensorDescriptor, dict[str, Any]]]) -> Make:
        return lambda address: [
            argument
            for pattern, notes in described
            for argument in make(dataclasses.replace(pattern, base=_At(pattern.base.dtype, address)), notes)
        ]

    return [maker([(pattern, next(rest)) for pattern in of_tensor]) for of_tensor in patterns]


class _At:
    """A tensor's type and address, which are all that a descriptor reads of it."""

    __slots__ = ("_address", "dtype")

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """Returns the address."""
        return self._address


def _make_context_current(device: torch.device) -> None:
    """Makes a device's context current in this thread, as the driver requires for descriptors.

    Threads of autograd start without a context. The first launch by torch in a thread sets it.
    """
    current: set[torch.device] = _thread.__dict__.setdefault("devices", set())
    if device not in current:
        torch.zeros(1, device=device)
        current.add(device)


def _maker() -> Callable[[TensorDescriptor, dict[str, Any]], list[Any]]:
    """Returns Triton's function that makes a descriptor as the launcher takes it.

    The result is the tensor map, then its shape and strides.
    """
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError as error:
        raise KernelError(
            "this Triton makes descriptors in a way that flashtune does not support: "
            "install one from 3.6 to 3.9"
        ) from error

    # Later releases also pass the launch's other arguments, for descriptors of another kind.
    rest = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
    return lambda descriptor, notes: make_tensordesc_arg(descriptor, notes, *rest)


def without_making(run: Any) -> Callable[..., None]:
    """Returns a binary's launcher that takes existing descriptors instead of creating them."""
    inner = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if inner is None:
        raise KernelError(
            "this Triton launches kernels with descriptors in a way that flashtune does not support"
        )
    launcher = copy.copy(run)
    launcher.launch = inner
    bare: Callable[..., None] = launcher
    return bare


def without_memory(tensor: Tensor) -> Tensor:
    """Returns a meta tensor with the type, shape and strides of a tensor, without GPU memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def typed(workspace: Tensor, like: Tensor) -> Tensor:
    """Returns a view of a float32 workspace in another tensor's type."""
    return workspace.view(like.dtype)
