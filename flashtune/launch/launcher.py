"""A binary on one device with the grid and the integers of one problem, ready to be queued.

Triton's launcher is a Python object that checks for scratch memory in every call. Its other arguments to the
driver are constant. So they are recorded once, and later calls bypass the launcher.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from triton.runtime._allocation import _allocator

from flashtune.core.errors import KernelError
from flashtune.core.machine import machine_errors
from flashtune.launch.compilation import first_line, launching
from flashtune.launch.tma_descriptors import without_making

if TYPE_CHECKING:
    from torch import Tensor


# torch.cuda's function checks each time whether CUDA is initialised. The load of a binary already did that.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Queue(Protocol):
    """Queues a kernel on its device's current stream."""

    def __call__(self, values: tuple[Any, ...], described: Sequence[Any] = ...) -> None:
        """Queues a launch. Arguments of described tensors come first, then `values`, then integers."""
        ...


class Direct(NamedTuple):
    """The constant arguments with which a launcher calls the driver's function.

    Attributes:
        launch: The driver's function.
        before: Arguments before the stream.
        after: Arguments after the stream and before the kernel's own.
        as_one: Whether the kernel's own arguments are passed as one sequence.
    """

    launch: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    as_one: bool


def load(compiled: Any, device: torch.device) -> Callable[..., None]:
    """Returns a binary's launcher. A binary that is already loaded stays on its device.

    Triton 3.6 and older compile a C launcher for each new signature, which takes a third of a second.

    Raises:
        MachineError: The machine cannot load it, for example without a C compiler.
        KernelError: The binary cannot be loaded on the device.
    """
    with torch.cuda.device(device), machine_errors():
        try:
            # Access to `run` loads the binary onto the current device.
            run: Callable[..., None] = compiled.run
        except Exception as error:
            raise KernelError(first_line(error)) from error
    if compiled.function is None or isinstance(run, functools.partial):
        # Triton tries to load once. After a failure, `run` raises in each call.
        raise KernelError("a kernel's binary did not load when it was first asked for")
    return run


def queue_of(compiled: Any, grid: tuple[int, ...], integers: tuple[int, ...], device: torch.device) -> Queue:
    """Returns the queue of a binary on a device, and loads the binary there.

    Raises:
        KernelError: The binary cannot be loaded on the device.
    """
    from triton.runtime import driver

    run = load(compiled, device)
    if getattr(compiled.metadata, "tensordesc_meta", None):
        run = without_making(run)
    index = current_device() if device.index is None else device.index
    # Without launch metadata and hooks, which only profilers need and which cost a call each.
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    dims = (*grid, 1, 1)[:3]
    # Only GPU drivers have this attribute, and this function runs only with a GPU.
    stream: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
    direct = direct_launch(run, dims, head)
    if direct is None:
        queue = _indirect(run, dims, head, integers, index, stream)
    else:
        queue = _directly(direct, integers, index, stream)
    # Calls use only a handle, and Triton 3.9 unloads a binary without references.
    vars(queue)["binary"] = compiled
    return queue


def direct_launch(run: Any, grid: tuple[int, ...], head: tuple[Any, ...]) -> Direct | None:
    """Returns the arguments that a launcher adds to a launch, recorded from one call.

    Returns None if they depend on more than the stream and the values: the launcher allocates scratch memory
    or has an unknown structure.
    """
    launch = getattr(run, "launch", None)
    sizes = (getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    if launch is None or any(sizes) or getattr(run, "gsan_enabled", False):
        return None
    seen: list[tuple[Any, ...]] = []
    watched = copy.copy(run)
    watched.launch = lambda *arguments: seen.append(arguments)
    stream, values = object(), (object(), object())
    try:
        watched(*grid, stream, *head, *values)
    except (AttributeError, TypeError, ValueError):
        # The launcher uses the stream or the values, which are dummies here.
        return None
    if len(seen) != 1:
        return None
    (arguments,) = seen
    as_one = arguments[-1] == values
    places = [place for place, argument in enumerate(arguments) if argument is stream]
    if len(places) != 1 or not (as_one or arguments[-2:] == values):
        return None
    before, after = arguments[: places[0]], arguments[places[0] + 1 : -1 if as_one else -2]
    return Direct(launch, before, after, as_one)


def _directly(direct: Direct, integers: tuple[int, ...], device: int, stream: Callable[[int], int]) -> Queue:
    launch, before, after, as_one = direct
    # Bound once, because every call of every kernel uses it.
    current = current_device

    def queue(values: tuple[Any, ...], described: Sequence[Any] = ()) -> None:
        if current() != device:
            # The binary belongs to its device's context, which must be current.
            with torch.cuda.device(device):
                queue(values, described)
        elif as_one:
            launch(*before, stream(device), *after, (*described, *values, *integers))
        else:
            launch(*before, stream(device), *after, *described, *values, *integers)

    return queue


def _indirect(
    run: Callable[..., None],
    grid: tuple[int, ...],
    head: tuple[Any, ...],
    integers: tuple[int, ...],
    device: int,
    stream: Callable[[int], int],
) -> Queue:
    def queue(values: tuple[Any, ...], described: Sequence[Any] = ()) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                queue(values, described)
            return
        # Device-side descriptors are in scratch memory, from torch's stream-ordered pool.
        previous = _allocator.set(_allocate_scratch)
        try:
            run(*grid, stream(device), *head, *described, *values, *integers)
        finally:
            _allocator.reset(previous)

    return queue


def interpreted_queue(
    module: Any, entry: str, grid: tuple[int, ...], integers: tuple[int, ...]
) -> Callable[..., None]:
    """Returns a queue for a kernel in Triton's interpreter on the CPU. `integers` are the last arguments."""
    launch = getattr(module, entry)[grid]

    def queue(*values: Any) -> None:
        with launching():
            launch(*values, *integers)

    return queue


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes and uses the current stream, as the launch does
    return torch.empty(size, dtype=torch.int8, device="cuda")
