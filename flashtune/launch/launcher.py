"""A binary on one device with the grid and the integers of one problem, ready to be queued.

Triton's launcher is a Python object that checks for scratch memory in every call. Its other arguments to the
driver are constant. So they are recorded once, and later calls bypass the launcher.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.core.machine import machine_errors
from flashtune.launch.compilation import first_line, launching
from flashtune.launch.tma_descriptors import without_making

# torch.cuda's functions check each time whether CUDA is initialised. The load of a binary already did that.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# The handle of a device's current stream. Only builds of torch for GPUs have it.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Queue(NamedTuple):
    """A function that queues a kernel, and its constant arguments."""

    launch: Callable[..., None]
    before: tuple[Any, ...]  # Arguments before the stream.
    after: tuple[Any, ...]  # Arguments after the stream and before the kernel's own.
    as_one: bool  # Whether the kernel's own arguments are passed as one sequence.
    integers: tuple[int, ...] = ()  # The kernel's last arguments.
    binary: object = None  # The loaded kernel. Triton 3.9 unloads a binary without references.


def load(compiled: Any, device: torch.device) -> Callable[..., None]:
    """Returns a binary's launcher. A binary that is already loaded stays on its device.

    Triton 3.6 and older compile a C launcher for each new signature, which takes a third of a second.
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
    """Returns the queue of a binary on a device, and loads the binary there."""
    run = load(compiled, device)
    if getattr(compiled.metadata, "tensordesc_meta", None):
        run = without_making(run)
    # Without launch metadata and hooks, which only profilers need and which cost a call each.
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    dims = (*grid, 1, 1)[:3]
    queue = direct_launch(run, dims, head) or Queue(_through(run, dims, head), (), (), as_one=False)
    return queue._replace(integers=integers, binary=compiled)


def direct_launch(run: Any, grid: tuple[int, ...], head: tuple[Any, ...]) -> Queue | None:
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
    indices = [index for index, argument in enumerate(arguments) if argument is stream]
    if len(indices) != 1 or not (as_one or arguments[-2:] == values):
        return None
    before, after = arguments[: indices[0]], arguments[indices[0] + 1 : -1 if as_one else -2]
    return Queue(launch, before, after, as_one)


def _through(run: Callable[..., None], grid: tuple[int, ...], head: tuple[Any, ...]) -> Callable[..., None]:
    """Returns a function that calls Triton's launcher in each launch."""
    from triton.runtime._allocation import _allocator

    def launch(stream: int, *values: Any) -> None:
        # Device-side descriptors are in scratch memory, from torch's stream-ordered pool.
        previous = _allocator.set(_allocate_scratch)
        try:
            run(*grid, stream, *head, *values)
        finally:
            _allocator.reset(previous)

    return launch


def interpreted_queue(
    module: Any, entry: str, grid: tuple[int, ...], integers: tuple[int, ...]
) -> Callable[..., None]:
    """Returns a function that runs a kernel in Triton's interpreter on the CPU, program by program.

    `integers` are its last arguments.
    """
    launch = getattr(module, entry)[grid]

    def queue(*values: Any) -> None:
        with launching():
            launch(*values, *integers)

    return queue


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes and uses the current stream, as the launch does
    return torch.empty(size, dtype=torch.int8, device="cuda")
