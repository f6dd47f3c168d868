"""Compares the results of two kernels on all probes and random problems, bitwise if deterministic."""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.launch.binding import bind, compile_binary
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.verification import cases
from flashtune.verification.cases import Case, Level
from flashtune.verification.gradients import cases as gradient_cases
from flashtune.verification.gradients import inputs as gradients
from flashtune.verification.inputs.guarded_tensors import BITS, poison
from flashtune.verification.inputs.prepared import prepare
from tests.gpu.random.random_cases import random_case

RANDOM_PROBLEMS = 20
# Launches of a kernel whose sums have no order: how far these lie apart bounds what another order makes.
UNORDERED_LAUNCHES = 4
DEVICE = torch.device("cuda", 0)
# Gradients that one program makes by itself in every family: their bits are decided.
OF_ONE_PROGRAM = {"dk", "dv"}
# Changes that another order of float32 sums may cause, relative to the element and to the row's largest one.
ELEMENT, ROW = 2.0**-7, 2.0**-14

Written = dict[str, Tensor]
# Launches a kernel so many times on the tensors of one case.
Write = Callable[[Kernel, int], Iterator[Written]]


def cases_of(kernel: Kernel, target: Target, problem: Problem, config: Config, seed: int) -> Iterator[Case]:
    """All that a full check launches a kernel on, and random problems, of those that its family computes."""
    family = find_family(kernel.family)
    chance = random.Random(seed)
    own = gradient_cases if problem.is_backward else cases
    planned = (*own.main_cases(problem), *own.companions(problem, config, Level.FULL, reduced=False))
    drawn = (random_case(chance, problem, config) for _ in range(RANDOM_PROBLEMS))
    for case in (*planned, *drawn):
        if unsupported_reason(family, case.problem, target, kernel.specialization) is None:
            yield case


def unlike(right: Kernel, broken: Kernel, target: Target, case: Case, seed: int, launches: int) -> str:
    """The first tensor of which a kernel writes other values than the right one, or nothing.

    Args:
        right: The unmodified kernel.
        broken: The other.
        target: The GPU.
        case: The problem.
        seed: Of its inputs.
        launches: Of the broken kernel: other values in any of them tell it from the right one.
    """
    loose = case.problem.is_backward and not case.problem.deterministic
    write = (_gradients if case.problem.is_backward else _outputs)(case, seed, right.specialization, target)
    expected = list(write(right, UNORDERED_LAUNCHES if loose else 1))
    for written in write(broken, launches):
        for name, tensor in written.items():
            meant = [other[name] for other in expected]
            alike = _near if loose and name not in OF_ONE_PROGRAM else _same
            if not alike(tensor, meant):
                return name
    return ""


def _same(tensor: Tensor, meant: list[Tensor]) -> bool:
    bits = BITS[tensor.element_size()]
    return torch.equal(tensor.view(bits), meant[0].view(bits))


def _near(tensor: Tensor, meant: list[Tensor]) -> bool:
    """Whether sums are no farther from the right kernel's than another order may take them."""
    several = torch.stack([other.double() for other in meant])
    low, high = several.amin(0), several.amax(0)
    allowed = 2 * (high - low) + ELEMENT * high.abs() + ROW * high.abs().amax(-1, keepdim=True)
    bits = BITS[tensor.element_size()]
    # Elements that neither kernel writes are NaN, so their bits are compared.
    unwritten = tensor.view(bits) == meant[0].view(bits)
    return bool((unwritten | ((tensor.double() - several[0]).abs() <= allowed)).all())


def _outputs(case: Case, seed: int, specialization: Specialization, target: Target) -> Write:
    memory = prepare(case, specialization.alignment, DEVICE, seed).memory
    q, k, v, out = (tensor.given for tensor in (memory.q, memory.k, memory.v, memory.out))
    lse = memory.lse.given if specialization.lse else None

    def write(kernel: Kernel, launches: int) -> Iterator[Written]:
        tensors = ForwardTensors(q, k, v, out)
        launch = bind(kernel, target, tensors, memory.side, compiled=compile_binary(kernel, target))
        for _ in range(launches):
            poison(memory.out)
            poison(memory.lse)
            launch((q, k, v, out, lse), case.scale, memory.side)
            yield {"out": out.clone()} | ({} if lse is None else {"lse": lse.clone()})

    return write


def _gradients(case: Case, seed: int, specialization: Specialization, target: Target) -> Write:
    prepared = gradients.prepare(case, specialization.alignment, DEVICE, seed, specialization.lse)
    tensors, side = prepared.tensors, prepared.side

    def write(kernel: Kernel, launches: int) -> Iterator[Written]:
        launch = bind(kernel, target, tensors, side, compiled=compile_binary(kernel, target))
        for _ in range(launches):
            for quantity in prepared.written.values():
                poison(quantity)
            launch(tensors, case.scale, side)
            yield {name: quantity.view.clone() for name, quantity in prepared.written.items()}

    return write
