"""Evaluates the programs of plans: integers of 64 bits, without loops."""

import math
from collections.abc import Callable, Sequence

from flashtune.bundle.records import Entry, Instruction, Plan
from flashtune.core.errors import BundleError, KernelError

# Sizes and strides of a tensor.
Layout = tuple[Sequence[int], Sequence[int]]

BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "gcd": math.gcd,
    "eq": lambda a, b: int(a == b),
    "lt": lambda a, b: int(a < b),
}
# Parameters with these names are numbers, all others with names are addresses.
NUMBERS = frozenset({"scale", "softcap", "dropout"})
NULL = Instruction("const", 0)
INPUTS = frozenset({"const", "size", "stride", "multiprocessors"})
LIMIT = 2**63


def evaluate(plan: Plan, layouts: Sequence[Layout], multiprocessors: int) -> list[int]:
    """Returns all values of a plan's program.

    Args:
        plan: A plan that `check_entry` accepts.
        layouts: The sizes and strides of `plan.tensors`.
        multiprocessors: The GPU's number of multiprocessors.

    Raises:
        KernelError: The kernel cannot address these tensors.
    """
    values: list[int] = []
    for instruction in plan.program:
        try:
            value = _value(instruction, values, layouts, multiprocessors)
        except (IndexError, ZeroDivisionError) as error:
            raise KernelError(
                f"a bundle's plan does not fit the tensors ({error}): build it again"
            ) from error
        if not -LIMIT <= value < LIMIT:
            raise KernelError(
                "sizes or strides of tensors are too large for this kernel: use smaller tensors"
            )
        values.append(value)
    return values


def _value(
    instruction: Instruction, values: list[int], layouts: Sequence[Layout], multiprocessors: int
) -> int:
    operation, a, b, c = instruction.operation, instruction.a, instruction.b, instruction.c
    if operation in BINARY:
        return BINARY[operation](values[a], values[b])
    if operation == "const":
        return a
    if operation == "size":
        return layouts[a][0][b]
    if operation == "stride":
        return layouts[a][1][b]
    if operation == "multiprocessors":
        return multiprocessors
    if operation == "bits":
        return values[a].bit_length()
    if operation == "select":
        return values[b] if values[a] else values[c]
    if values[a]:
        raise KernelError("the kernel cannot address tensors with these strides: make them contiguous")
    return 0


def check_entry(entry: Entry) -> Entry:
    """Returns the entry. Every position in it must exist, and every address must be that of a name.

    Raises:
        BundleError: A position does not exist, or a parameter has another type than its name.
    """
    plan = entry.plan
    count = len(plan.program)
    for position, instruction in enumerate(plan.program):
        if instruction.operation in ("size", "stride"):
            valid = 0 <= instruction.a < len(plan.tensors) and instruction.b < 8
        else:
            reads = 0 if instruction.operation in INPUTS else instruction.a
            operands = (reads, instruction.b, instruction.c)
            # An instruction without operands has zeros there.
            valid = all(0 <= operand < max(position, 1) for operand in operands)
        if not valid or (position == 0 and instruction.operation not in INPUTS):
            raise BundleError(f"a plan of {entry.kernel} reads a value that does not exist: build it again")
    used = [value for stage in entry.stages for value in stage.grid]
    used += [value for workspace in plan.workspaces for value in workspace.shape]
    for descriptor in plan.descriptors:
        if len({len(descriptor.shape), len(descriptor.strides), len(descriptor.box)}) != 1:
            raise BundleError(f"a descriptor of {entry.kernel} has inconsistent dimensions: build it again")
        used += [*descriptor.shape, *descriptor.strides]
    parameters = [parameter for stage in entry.stages for parameter in stage.parameters]
    maps = [parameter.value for parameter in parameters if parameter.type == "map"]
    used += [parameter.value for parameter in parameters if parameter.type != "map" and not parameter.name]
    if any(value >= count for value in used) or any(value >= len(plan.descriptors) for value in maps):
        raise BundleError(f"a launch of {entry.kernel} reads a value that does not exist: build it again")
    for parameter in parameters:
        if parameter.name:
            valid = parameter.type == ("f32" if parameter.name in NUMBERS else "pointer")
        elif parameter.type == "pointer":
            valid = plan.program[parameter.value] == NULL
        else:
            valid = parameter.type != "f32"
        if not valid:
            raise BundleError(f"a parameter of {entry.kernel} has another type than its name: build it again")
    return entry
