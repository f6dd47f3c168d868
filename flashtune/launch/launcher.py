"""A binary on one device with the grid and the integers of one problem, ready to be queued.

Triton's launcher is an object in Python that looks for scratch memory in every call. All else that it passes
to the driver is the same each time, so that it is watched once and then gone past.
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
from flashtune.launch.compilation import first_line
from flashtune.launch.interpreter import launching
from flashtune.launch.tma_descriptors import without_making

if TYPE_CHECKING:
    from torch import Tensor


# torch.cuda's own function looks each time whether CUDA is initialised, as loading a binary did.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Queue(Protocol):
    """Queues a kernel on its device's current stream."""

    def __call__(self, values: tuple[Any, ...], described: Sequence[Any] = ...) -> None:
        """`values` come before the kernel's integers, and what stands for described tensors before them."""
        ...


class Direct(NamedTuple):
    """How a binary's launcher hands a launch over to its driver's function.

    Attributes:
        launch: That function.
        before: What it takes before the stream.
        after: What it takes behind the stream and before the kernel's own arguments.
        as_one: Whether it takes these as one sequence.
    """

    launch: Callable[..., None]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    as_one: bool


def load(compiled: Any, device: torch.device) -> Callable[..., None]:
    """A binary's launcher. A binary that is loaded already stays on the device where it is.

    Triton 3.6 and older compile a launcher in C for arguments of a new kind, in a third of a second.

    Raises:
        MachineError: The machine cannot load it, as without a C compiler.
        KernelError: It cannot be loaded there.
    """
    with torch.cuda.device(device), machine_errors():
        try:
            # Reading `run` loads the binary onto the current device.
            run: Callable[..., None] = compiled.run
        except Exception as error:
            raise KernelError(first_line(error)) from error
    if compiled.function is None or isinstance(run, functools.partial):
        # Triton tries once: what `run` is from then on would raise in calls.
        raise KernelError("a kernel's binary did not load when it was first asked for")
    return run


def queue_of(compiled: Any, grid: tuple[int, ...], integers: tuple[int, ...], device: torch.device) -> Queue:
    """A binary to be queued on a device, onto which it is loaded.

    Raises:
        KernelError: It cannot be loaded there.
    """
    from triton.runtime import driver

    run = load(compiled, device)
    if getattr(compiled.metadata, "tensordesc_meta", None):
        run = without_making(run)
    index = current_device() if device.index is None else device.index
    # No launch metadata and no hooks: they are a profiler's, and cost a call each.
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    dims = (*grid, 1, 1)[:3]
    # Only GPU drivers have it, and only on a GPU is this called.
    stream: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
    direct = direct_launch(run, dims, head)
    if direct is None:
        queue = _indirect(run, dims, head, integers, index, stream)
    else:
        queue = _directly(direct, integers, index, stream)
    # Of the binary only a handle is passed, and Triton 3.9 unloads what nobody holds.
    vars(queue)["binary"] = compiled
    return queue


def direct_launch(run: Any, grid: tuple[int, ...], head: tuple[Any, ...]) -> Direct | None:
    """What a launcher's Python adds to the arguments of a launch, as it is seen to add it once.

    None where that depends on more than the stream and the values: it allocates scratch memory, or is of
    a kind that adds anything else.
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
        # It looks at the stream or at the values, and these are neither.
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
    # Bound once: this is what every call of every kernel comes to.
    current = current_device

    def queue(values: tuple[Any, ...], described: Sequence[Any] = ()) -> None:
        if current() != device:
            # The binary belongs to its device's context, which must be the current one.
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
        # Descriptors made on the device live in scratch memory, from torch's stream-ordered pool.
        previous = _allocator.set(_allocate_scratch)
        try:
            run(*grid, stream(device), *head, *described, *values, *integers)
        finally:
            _allocator.reset(previous)

    return queue


def interpreted_queue(
    module: Any, entry: str, grid: tuple[int, ...], integers: tuple[int, ...]
) -> Callable[..., None]:
    """A kernel of a rendered module, run by Triton's interpreter on the CPU. `integers` come last."""
    launch = getattr(module, entry)[grid]

    def queue(*values: Any) -> None:
        with launching():
            launch(*values, *integers)

    return queue


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes and uses the current stream, as the launch does
    return torch.empty(size, dtype=torch.int8, device="cuda")
