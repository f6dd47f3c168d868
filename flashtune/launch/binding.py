"""Binding of kernels to the strides and lengths of one problem.

The plans of the rendered module give the grid and the integer arguments of each kernel once. A call then
passes addresses, numbers and those integers to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, NUMBERS, ExtraInputs
from flashtune.core.kernel import Argument, Kernel
from flashtune.core.target import Target
from flashtune.launch.compilation import compile_kernel, interpreting, load_module
from flashtune.launch.launch import Launch, Stage, interpreted_launch_of, launch_of
from flashtune.launch.launcher import interpreted_queue, queue_of
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.launch.tma_descriptors import DescriptorArguments, makers_of, typed, without_memory
from flashtune.launch.workspaces import Allocate, Kept, Workspaces, allocate_workspace
from flashtune.request.quantization import E4M3, unit_scales

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from flashtune.launch.bundle_binding import BundledBinary

# The names of a backward pass's workspaces begin so and end with the workspace's index.
WORKSPACE = "workspace_"

Tensors = ForwardTensors | BackwardTensors
# The binaries of a kernel and its steps, by the names of their functions.
Binary = dict[str, "CompiledKernel"]


def compile_binary(kernel: Kernel, target: Target) -> Binary:
    """Returns all binaries for a launch of a kernel on a target.

    Threads compile the steps at the same time, because LLVM and ptxas do not hold Python's lock.
    """
    main, *steps = kernel.parts
    with ThreadPoolExecutor(len(steps) or 1) as threads:
        others = [threads.submit(compile_kernel, step, target) for step in steps]
        binary = {main.entry: compile_kernel(main, target)}
        return binary | {step.entry: other.result() for step, other in zip(steps, others, strict=True)}


def bind(
    kernel: Kernel,
    target: Target,
    tensors: Tensors,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    compiled: Binary | BundledBinary | None = None,
    allocate: Allocate = allocate_workspace,
    kept: Kept | None = None,
) -> Launch:
    """Returns the launch of a kernel for tensors of these shapes: loads, compiles and plans.

    Tensors and extra inputs have the strides and lengths of later calls. With `compiled`, many shapes share
    one binary. With `kept`, launches share the memory of workspaces. Verification allocates poisoned
    workspaces.
    """
    if not isinstance(compiled, dict | None):
        from flashtune.launch.bundle_binding import bind_entry

        return bind_entry(compiled, tensors, side, allocate=allocate, kept=kept)
    module = load_module(kernel)
    plan = plan_launch(kernel, module, tensors, side)
    plans, names, workspaces = plan.kernels, plan.names, plan.workspaces
    fields = tensors._fields
    if interpreting():
        queues = (interpreted_queue(module, entry, at, ints) for entry, _, at, ints in plans)
        stages = tuple(zip(queues, names, strict=True))
        return interpreted_launch_of(stages, fields, workspaces, allocate)
    binary = compiled or compile_binary(kernel, target)
    device = tensors.q.device
    patterns: dict[str, Sequence[Any]] = {}
    arguments = None
    if kernel.takes_descriptors:
        # Each call draws its own seed for dropout, so a plan has none.
        lasting = tuple(tensor if tensor is None else without_memory(tensor) for tensor in plan.tensors)
        scratch = [allocate_workspace(shape, torch.device("meta")) for shape in workspaces.values()]
        patterns = descriptors_of(
            kernel, module, tensors, lasting, dict(zip(workspaces, scratch, strict=True))
        )
        metadata = binary[kernel.entry].metadata.tensordesc_meta
        arguments = DescriptorArguments(makers_of([*patterns.values()], metadata))
    return launch_of(
        tuple(
            Stage(queue_of(binary[entry], at, ints, device), taken, bool(patterns) and entry == kernel.entry)
            for (entry, _, at, ints), taken in zip(plans, names, strict=True)
        ),
        fields,
        device,
        Workspaces(workspaces, device, allocate, kept) if workspaces else None,
        tuple(patterns),
        arguments,
        unit_scales(tensors.q) if tensors.q.dtype is E4M3 else None,
    )


class LaunchPlan(NamedTuple):
    """The kernels of a launch for tensors of some shapes."""

    # The function, arguments, grid and integers of each kernel, in launch order.
    kernels: list[tuple[str, tuple[Argument, ...], tuple[int, ...], tuple[int, ...]]]
    names: list[tuple[str, ...]]  # For each kernel, the names of its arguments that change with calls.
    workspaces: dict[str, tuple[int, ...]]  # The shapes of workspaces.
    tensors: tuple[Tensor | None, ...]  # The tensors that the module's functions take.


def plan_launch(kernel: Kernel, module: Any, tensors: Tensors, side: ExtraInputs) -> LaunchPlan:
    """Returns the plan of a launch, by the functions of the kernel's rendered module."""
    # Scales of quantised queries have fixed strides, so the plan does not need them.
    quantized = tensors.q.dtype is E4M3
    planned_side = () if quantized else (name for name in kernel.all_side if name not in NUMBERS)
    planned = (*tensors.planned, *(getattr(side, name) for name in planned_side))
    grid, shapes, integers = module.launch_plan(*planned)
    plans = [(kernel.entry, kernel.arguments, grid, integers)]
    if kernel.prologue is not None:
        plans.insert(0, (kernel.prologue.entry, kernel.prologue.arguments, *module.prologue_plan(*planned)))
        before = kernel.prologue.before
        if before is not None:
            plans.insert(0, (before.entry, before.arguments, *module.first_plan(*planned)))
    if kernel.epilogue is not None:
        plans.append((kernel.epilogue.entry, kernel.epilogue.arguments, *module.epilogue_plan(*planned)))
    names = [_names(kernel, tensors, arguments, ints) for _, arguments, _, ints in plans]
    workspaces = dict(zip(_workspaces(tensors, names), shapes, strict=True))
    return LaunchPlan(plans, names, workspaces, planned)


def _names(
    kernel: Kernel, tensors: Tensors, arguments: tuple[Argument, ...], integers: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the names of a kernel's arguments without descriptors (first) and integers (last)."""
    plain = [argument.name for argument in arguments if not argument.type.startswith("tensordesc")]
    names = plain[: len(plain) - len(integers)]
    if isinstance(tensors, ForwardTensors) and not kernel.specialization.lse:
        # A kernel without a log-sum-exp gets the output in its place and never accesses it.
        names = ["out" if name == "lse" else name for name in names]
    return tuple(names)


def _workspaces(tensors: Tensors, names: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the names of the workspaces, in the order of their shapes in a plan.

    Those of a backward pass end with their index, and those of a forward pass are in the kernels' order.
    """
    arguments = {*tensors._fields, *ExtraInputs._fields, "scale"}
    workspaces = dict.fromkeys(name for taken in names for name in taken if name not in arguments)
    return sorted(workspaces, key=lambda name: name if name.startswith(WORKSPACE) else "")


def descriptors_of(
    kernel: Kernel,
    module: Any,
    tensors: Tensors,
    planned: tuple[Tensor | None, ...],
    workspaces: dict[str, Tensor],
) -> dict[str, Sequence[Any]]:
    """Returns the descriptors of each tensor and workspace by its name."""
    if isinstance(tensors, BackwardTensors):
        descriptors: dict[str, Sequence[Any]] = module.descriptors(*planned, *workspaces.values())
        return descriptors
    q, k, v, out = planned[:4]
    source = "v"
    if kernel.prologue is not None and tensors.q.dtype is E4M3:
        # The kernel reads the values from the workspace that the prologue fills.
        source = next(iter(workspaces))
        v = typed(workspaces[source], tensors.v)
    names = ("q", "k", source, "out")
    if kernel.describes_bias:
        side = [name for name in kernel.all_side if name not in NUMBERS]
        bias = planned[len(names) + side.index("bias")]
        return dict(zip((*names, "bias"), module.descriptors(q, k, v, out, bias), strict=True))
    return dict(zip(names, module.descriptors(q, k, v, out), strict=True))
