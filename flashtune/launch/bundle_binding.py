"""Binding of a bundle's kernels to the strides and lengths of one problem, without Triton."""

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any, NamedTuple

import torch

from flashtune.bundle.cubin import machine_digest, parameter_sizes
from flashtune.bundle.driver import SIZES, Driver
from flashtune.bundle.program import evaluate
from flashtune.bundle.records import Descriptor, Entry
from flashtune.core.errors import BundleError, KernelError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.launch.launch import Launch, Stage, launch_of
from flashtune.launch.launcher import Queue
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.launch.tma_descriptors import DescriptorArguments, Make
from flashtune.launch.workspaces import Allocate, Kept, Workspaces, allocate_workspace
from flashtune.request.quantization import E4M3, unit_scales


class BundledBinary(NamedTuple):
    """A kernel of a bundle with its steps, loaded on a device."""

    entry: Entry
    functions: tuple[c_void_p, ...]
    driver: Driver


def load_entry(
    entry: Entry, code_of: Callable[[str], bytes], driver: Driver, device: torch.device
) -> tuple[c_void_p, ...]:
    """Returns the functions of an entry's kernels on a device. `code_of` returns machine code by SHA-256.

    Raises:
        BundleError: The machine code is not that of the entry.
        KernelError: The driver refuses the machine code.
    """
    functions = []
    for stage in entry.stages:
        code = code_of(stage.code)
        if machine_digest(code, stage.function) != stage.machine:
            raise BundleError(f"the machine code of {entry.kernel} is another kernel's: build it again")
        sizes = [SIZES[parameter.type] for parameter in stage.parameters]
        if parameter_sizes(code, stage.function) != sizes:
            raise BundleError(f"the parameters of {entry.kernel} are not those of its code: build it again")
        with torch.cuda.device(device):
            functions.append(driver.load(code, stage, device.index))
    return tuple(functions)


def bind_entry(
    binary: BundledBinary,
    tensors: ForwardTensors | BackwardTensors,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    multiprocessors: int | None = None,
    allocate: Allocate = allocate_workspace,
    kept: Kept | None = None,
) -> Launch:
    """Returns the launch of an entry for tensors of these shapes, as `binding.bind` does.

    `multiprocessors` is by default the number of the tensors' device.
    """
    entry, functions, driver = binary
    plan, device = entry.plan, tensors.q.device
    if multiprocessors is None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    inputs: dict[str, Any] = side._asdict() | tensors._asdict()
    read: list[Any] = [inputs.get(name) for name in plan.tensors]
    known = {*inputs, "scale", *(workspace.name for workspace in plan.workspaces)}
    used = {descriptor.tensor for descriptor in plan.descriptors}
    used |= {parameter.name for stage in entry.stages for parameter in stage.parameters if parameter.name}
    if any(tensor is None for tensor in read) or not used <= known:
        raise KernelError(f"the kernel {entry.kernel} takes other tensors than this call: build it again")
    values = evaluate(plan, [(tensor.shape, tensor.stride()) for tensor in read], multiprocessors)
    shapes = {
        workspace.name: tuple(values[extent] for extent in workspace.shape) for workspace in plan.workspaces
    }
    makers: dict[str, list[Callable[[int], bytes]]] = {}
    for descriptor in plan.descriptors:
        makers.setdefault(descriptor.tensor, []).append(_maker(driver, descriptor, values))
    stages = []
    for stage, function in zip(entry.stages, functions, strict=True):
        grid = [values[extent] for extent in stage.grid]
        if not all(0 <= extent < 2**31 for extent in grid):
            raise KernelError(f"the grid {grid} of {stage.function} is out of range: use smaller tensors")
        run = driver.queue(function, stage, grid, values, len(plan.descriptors), device.index)
        names = tuple(parameter.name for parameter in stage.parameters if parameter.name)
        described = any(parameter.type == "map" for parameter in stage.parameters)
        stages.append(Stage(Queue(run, (), (), as_one=True), names, described))
    return launch_of(
        tuple(stages),
        tensors._fields,
        device,
        Workspaces(shapes, device, allocate, kept) if shapes else None,
        tuple(makers),
        DescriptorArguments([_all(of_tensor) for of_tensor in makers.values()]) if makers else None,
        unit_scales(tensors.q) if tensors.q.dtype is E4M3 else None,
    )


def _maker(driver: Driver, descriptor: Descriptor, values: Sequence[int]) -> Callable[[int], bytes]:
    """Returns the function that makes a descriptor of a tensor at an address."""
    shape = [values[extent] for extent in descriptor.shape]
    strides = [values[stride] for stride in descriptor.strides]
    return lambda address: driver.descriptor(descriptor, shape, strides, address)


def _all(makers: Sequence[Callable[[int], bytes]]) -> Make:
    return lambda address: [make(address) for make in makers]
