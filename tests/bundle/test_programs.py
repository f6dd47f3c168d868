"""Tests of programs: they give the integers of the launch code, whatever the sizes and strides."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from flashtune.bundle.program import check_entry, evaluate
from flashtune.bundle.records import Entry, Instruction, Plan, Stage
from flashtune.core.errors import BundleError, KernelError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Dtype
from flashtune.launch.binding import descriptors_of, plan_launch
from flashtune.launch.bundle_entries import DIMENSIONS, launch_program
from flashtune.launch.symbols import Program, Symbol, SymbolicTensor, contiguous, symbolic_module
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from tests.emulator.launch_code import SMS, launch_code
from tests.support.golden_kernels import KERNELS, problem_of


def some_tensor(name: str, dtype: Any, dimensions: int, chance: random.Random) -> SymbolicTensor:
    """A tensor of any sizes and strides. Strides are often zero, and sizes often one."""
    shape = [chance.choice((1, chance.randint(1, 9000))) for _ in range(dimensions)]
    strides = [chance.choice((0, 8, 128 * chance.randint(1, 999))) for _ in range(dimensions)]
    return SymbolicTensor(name, dtype, shape, strides)


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", KERNELS)
def test_program_gives_the_integers_of_launch_code(name: str, fuzz_count: Callable[[int, int], int]) -> None:
    kernel, problem, chance = KERNELS[name](), problem_of(name), random.Random(name)
    program, symbolic, patterns = launch_program(kernel, problem)
    code = launch_code(kernel)
    kind = BackwardTensors if problem.is_backward else ForwardTensors
    dtype = torch.float8_e4m3fn if problem.dtype is Dtype.E4M3 else torch.bfloat16

    def flat(plan: Any, descriptors: dict[str, Any], place: Callable[[Any], int]) -> list[Any]:
        """All names, and all integers by `place`."""
        listed = [(entry, [*map(place, grid)], [*map(place, ints)]) for entry, _, grid, ints in plan.kernels]
        shapes = {name: [*map(place, shape)] for name, shape in plan.workspaces.items()}
        described = [
            (tensor, pattern.base.name, [*map(place, pattern.shape)], [*map(place, pattern.strides)])
            for tensor, of_tensor in descriptors.items()
            for pattern in of_tensor
        ]
        return [listed, plan.names, shapes, described]

    places = flat(symbolic, patterns, program.position)
    assert patterns or not kernel.takes_descriptors
    plan = Plan(tuple(program.tensors), tuple(program.instructions))
    refused = 0
    for _ in range(fuzz_count(20, 200)):
        tensors: Any = kind._make(some_tensor(field, dtype, 4, chance) for field in kind._fields)
        side: Any = ExtraInputs(
            **{field: some_tensor(field, None, count, chance) for field, count in DIMENSIONS.items()}  # type: ignore[arg-type]
        )
        inputs = side._asdict() | tensors._asdict()
        layouts = [(inputs[tensor].shape, inputs[tensor].stride()) for tensor in plan.tensors]
        try:
            expected = plan_launch(kernel, code, tensors, side)
            scratch: Any = {
                field: contiguous(field, torch.float32, shape) for field, shape in expected.workspaces.items()
            }
            described = (
                descriptors_of(kernel, code, tensors, expected.tensors, scratch)
                if kernel.takes_descriptors
                else {}
            )
        except (ValueError, ZeroDivisionError):
            refused += 1
            with pytest.raises(KernelError):
                evaluate(plan, layouts, SMS)
            continue
        values = evaluate(plan, layouts, SMS)
        found = flat(symbolic, patterns, lambda item, values=values: values[program.position(item)])  # type: ignore[misc]
        assert found == flat(expected, described, int)
    assert places == flat(symbolic, patterns, program.position), "evaluation adds nothing to the program"
    assert refused < fuzz_count(20, 200), "some tensors must be accepted"


@pytest.mark.parametrize(
    "code",
    [
        "def launch_plan(q):\n    if q.shape[0] > 1:\n        return 1\n    return 2",
        "def launch_plan(q):\n    n = q.shape[0]\n    while n > 1:\n        n = n // 2\n    return n",
        "def launch_plan(q):\n    return q.shape[0] and range(q.shape[0])",
    ],
)
def test_choices_by_a_size_that_programs_cannot_express_are_refused(code: str) -> None:
    program = Program()
    with pytest.raises((BundleError, TypeError)):
        symbolic_module(code, program).launch_plan(contiguous("q", None, [Symbol("const", 2)]))


STAGE = Stage("f", "0" * 64, "0" * 32, 0, 128, early=False, parameters=(), grid=(0,))
ENTRY = Entry("0" * 32, "f", (STAGE,), Plan((), (Instruction("const", 1),)), "3", "12")


@pytest.mark.parametrize(
    "program",
    [
        (),
        (Instruction("add", 0, 0),),
        (Instruction("const", 1), Instruction("add", 0, 1)),
        (Instruction("const", 1), Instruction("add", -1, 0)),
        (Instruction("const", 1), Instruction("select", 0, 0, 1)),
        (Instruction("size", 0, 0),),
    ],
)
def test_plans_that_read_missing_values_are_refused(program: tuple[Instruction, ...]) -> None:
    assert check_entry(ENTRY) is ENTRY
    with pytest.raises(BundleError, match="build it again"):
        check_entry(msgspec.structs.replace(ENTRY, plan=Plan((), program)))


def test_values_of_more_than_64_bits_are_refused() -> None:
    plan = Plan((), (Instruction("const", 2**62), Instruction("add", 0, 0)))
    with pytest.raises(KernelError, match="too large"):
        evaluate(plan, [], SMS)
