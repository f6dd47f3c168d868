"""Launches of the kernels of one pass, bound to strides and lengths. This code runs in every call.

Arguments have names: fields of `ForwardTensors` or `BackwardTensors`, of `ExtraInputs`, names of workspaces,
and `scale`. Each kernel takes the arguments that it names, so families can divide the work as they like.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, NUMBERS, ExtraInputs
from flashtune.launch.launcher import Queue, current_device, current_stream
from flashtune.launch.tma_descriptors import DescriptorArguments
from flashtune.launch.workspaces import Allocate, Workspaces

# A scale of zero means plain averages. As a factor of -inf it would give NaN.
MIN_SCALE = 1e-30
# Runs the kernels of a pass, as the result of `launch_of`.
Launch = Callable[..., None]
# Bound once, for `map`.
address_of = torch.Tensor.data_ptr


class Stage(NamedTuple):
    """One kernel of a launch."""

    queue: Queue  # Its binary, grid and integers.
    # The names of its arguments, without descriptors (first) and integers (last).
    names: tuple[str, ...]
    described: bool = False  # Whether it takes the descriptors of the launch.


def launch_of(
    stages: tuple[Stage, ...],
    fields: tuple[str, ...],
    device: torch.device,
    workspaces: Workspaces | None = None,
    described: tuple[str, ...] = (),
    arguments: DescriptorArguments | None = None,
    ones: Tensor | None = None,
) -> Launch:
    """Returns a function that queues the kernels of one pass on the current stream of their device.

    Its arguments are the tensors, as in `ForwardTensors` or `BackwardTensors`; the factor of scores, which is
    not negative; and the extra inputs of the problem. Shapes and strides are bound, so a call reads only
    addresses, each once: a transposed view works like its base.

    Args:
        stages: The kernels in order.
        fields: The names of the tensors of a call, in order.
        device: The device on which the kernels are loaded.
        workspaces: The workspaces of all kernels, if there are any.
        described: The names of the tensors and workspaces that are passed as descriptors.
        arguments: Their descriptors.
        ones: Replaces missing scales of quantised inputs: at least one number for each head.
    """
    taken = {*described, *(name for stage in stages for name in stage.names)}
    takes_numbers = not taken.isdisjoint(NUMBERS)
    tensor_names, side_names = _among(fields, taken), _among(ExtraInputs._fields, taken - {*NUMBERS})
    order = [*tensor_names, "scale", *side_names, *(workspaces.names if workspaces else ()), *NUMBERS]
    tensors_of, side_of = taking(fields, tensor_names), _side_taking(side_names, ones)
    described_of = taking(order, described)
    bound = [(*stage.queue, taking(order, stage.names), stage.described) for stage in stages]
    known_descriptors = None if arguments is None else arguments.at
    index = device.index

    # Each step costs host time in every call, and a GPU may be idle meanwhile.
    def launch(tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS) -> None:
        if current_device() != index:
            # The binaries belong to their device's context, which must be current.
            with torch.cuda.device(index):
                launch(tensors, scale, side)
            return
        stream = current_stream(index)
        factor = scale if scale > MIN_SCALE else MIN_SCALE
        values: list[Any] = [*map(address_of, tensors_of(tensors)), factor]
        if side_of is not None:
            values += map(address_of, side_of(side))
        if workspaces is not None:
            addresses, memory, give_back = workspaces.take(stream)
            values += addresses
        if takes_numbers:
            values += side.numbers
        descriptors: tuple[Any, ...] = ()
        if known_descriptors is not None:
            at = described_of(values)
            descriptors = known_descriptors(at) or arguments.made(at, device)  # type: ignore[union-attr]
        for run, before, after, as_one, integers, _, take, is_described in bound:
            own = take(values) + integers
            if is_described:
                own = descriptors + own
            if as_one:
                run(*before, stream, *after, own)
            else:
                run(*before, stream, *after, *own)
        if workspaces is not None:
            give_back(memory)

    return launch


def taking(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that selects the values of some names, in C for two or more."""
    indices = [names.index(name) for name in wanted]
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


def _among(names: Sequence[str], taken: set[str]) -> list[str]:
    return [name for name in names if name in taken]


def _side_taking(
    names: Sequence[str], ones: Tensor | None
) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """Returns a function that selects extra inputs, with `ones` for absent ones; None without names."""
    if not names:
        return None
    take = taking(ExtraInputs._fields, names)
    if ones is None:
        return take
    return lambda side: tuple(ones if value is None else value for value in take(side))


def interpreted_launch_of(
    stages: tuple[tuple[Callable[..., None], tuple[str, ...]], ...],
    fields: tuple[str, ...],
    workspaces: dict[str, tuple[int, ...]],
    allocate: Allocate,
) -> Launch:
    """Returns a function that runs the kernels of one pass in Triton's interpreter on the CPU.

    `stages` are functions of the kernels' arguments except integers, and the names of these arguments. The
    other arguments are those of `launch_of`.
    """

    def launch(tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS) -> None:
        values: dict[str, Any] = side._asdict() | dict(zip(fields, tensors, strict=True))
        for name, shape in workspaces.items():
            values[name] = allocate(shape, values["q"].device)
        values["scale"] = max(scale, MIN_SCALE)
        for run, names in stages:
            run(*(values[name] for name in names))

    return launch
