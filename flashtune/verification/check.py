"""Verifies a kernel of either pass: launches it on every case of a level and compares with the reference.

The figures stay on the device and are read once at the end. A check therefore takes little longer than its
launches.

The first check of a process imports modules and loads torch's CUDA kernels. This takes as long as the check
itself and does not depend on the kernel. `preload` does it while the kernel compiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from triton.errors import TritonError

from flashtune.core.config import Config
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.record import Verdict
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, compile_binary
from flashtune.launch.compilation import first_line, interpreting
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Case, Level, splits_of
from flashtune.verification.comparison import Finding
from flashtune.verification.inputs.prepared import next_seed
from flashtune.verification.passes import case_findings, forget, planned_cases
from flashtune.verification.probes import INVARIANCE, Probe

if TYPE_CHECKING:
    from flashtune.launch.bundle_binding import BundledBinary

INTERPRETER = "interpreter"
# The ratio that a verdict stores for a result that is not finite. JSON has no infinity.
NOT_FINITE = 1e9

Result = TypeVar("Result")

# Seed of inputs that are discarded.
SEED = 0


def check_kernel(
    family: Family,
    problem: Problem,
    config: Config,
    specialization: Specialization,
    target: Target,
    device: torch.device,
    level: Level = Level.FULL,
    *,
    seed: int | None = None,
) -> Verdict:
    """Renders the kernel of a config and verifies it, on the device or under Triton's interpreter.

    Under the interpreter a 16-bit problem is computed in float32, at reduced sizes, up to the first failure.
    The strict level also checks the binaries with and without the log-sum-exp (in a backward pass, its
    gradient) and the other causal alignment. In a backward pass it checks those with and without the gradient
    of an additive bias. It checks each of these with delayed warps too. The full level also checks the
    problem's own shape. Without a seed, inputs are new in each check.
    """
    # Imported here because callers with a rendered kernel do not need the template engine.
    from flashtune.templates.rendering import render

    problem = interpretable(problem) if interpreting() else problem
    verdicts = []
    for variant, specialized in _variants(problem, specialization, level):
        kernel = render(family, variant, config, specialized)
        verdicts.append(check_rendered(kernel, variant, config, target, device, level, seed=seed))
        if level is Level.STRICT and verdicts[-1].passed and not interpreting():
            late = check_delayed(kernel, variant, config, target, device, seed=seed)
            if late is not None:
                verdicts.append(late)
    return joined(verdicts)


def check_rendered(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    level: Level = Level.FULL,
    *,
    seed: int | None = None,
    compiled: Binary | BundledBinary | None = None,
) -> Verdict:
    """Verifies a rendered kernel as `check_kernel` does; `compiled` is its binary if there is one already."""
    seed = next_seed() if seed is None else seed
    binary = None if interpreting() else compiled or compile_binary(kernel, target)
    findings: list[Finding] = []
    planned = _planned(kernel, problem, config, target, level, seed)
    keep = level is not Level.QUICK
    with _on(device), contextlib.nullcontext() if interpreting() else one_thread():
        try:
            for case, case_seed in planned:
                of_case = tuple(case_findings(kernel, binary, case, case_seed, target, device, keep=keep))
                findings += of_case
                # On the CPU, figures are known at once and launches are slow, so stop at the first failure.
                if interpreting() and not all(finding.holds() for finding in of_case):
                    break
            assert findings, "a kernel without problems is not proven"
            if problem.batch_invariant and binary is not None:
                from flashtune.verification.invariance import invariance_findings

                findings += invariance_findings(kernel, binary, problem, target, device, seed, others=keep)
            figures = read_figures(findings)
        except (RuntimeError, TritonError) as error:
            forget()
            raise KernelError(first_line(error)) from error
    name = INTERPRETER if interpreting() else torch.cuda.get_device_name(device)
    verdict = _verdict(findings, figures, name, seed)
    if not verdict.passed:
        forget()
        return verdict
    probes = tuple({case.probe.value: None for case, _ in planned})
    return msgspec.structs.replace(verdict, probes=(*probes, *_row_probes(problem)))


def check_delayed(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    *,
    seed: int | None = None,
) -> Verdict | None:
    """Verifies a kernel at the full level with random delays of its warps, to find missing waits.

    Returns None for a kernel whose compiler inserts all waits.
    """
    # Imported here because the self-check of a first call does not need it.
    from flashtune.verification.schedule_fuzzing import DELAYS, delayed

    late = delayed(kernel)
    if late is None:
        return None
    verdict = check_rendered(late, problem, config, target, device, seed=seed)
    if not verdict.passed:
        return msgspec.structs.replace(verdict, failed=f"delayed {verdict.failed}")
    return msgspec.structs.replace(verdict, probes=(*(verdict.probes or ()), DELAYS))


def full_probes(kernel: Kernel, problem: Problem, config: Config, target: Target) -> frozenset[str]:
    """Returns the probes of a full check, and `delays` if `check_delayed` returns a verdict."""
    from flashtune.verification.schedule_fuzzing import DELAYS, delayed

    planned = _planned(kernel, problem, config, target, Level.FULL, 0)
    late = () if delayed(kernel) is None else (DELAYS,)
    return frozenset((*(case.probe.value for case, _ in planned), *late, *_row_probes(problem)))


def _row_probes(problem: Problem) -> tuple[str, ...]:
    """Returns the name of the comparison of rows between calls if the problem needs it."""
    return (INVARIANCE,) if problem.batch_invariant else ()


def read_figures(findings: list[Finding]) -> list[float]:
    """Returns all figures in order. Waits for the device once for each dtype of the figures."""
    values = [0.0] * len(findings)
    for dtype in {finding.figure.dtype for finding in findings}:
        alike = [index for index, finding in enumerate(findings) if finding.figure.dtype is dtype]
        read = torch.stack([findings[index].figure for index in alike]).tolist()
        for index, value in zip(alike, read, strict=True):
            values[index] = float(value)
    return values


def interpretable(problem: Problem) -> Problem:
    """Returns the problem in float32: Triton's interpreter computes wrong products of 16-bit tiles."""
    return msgspec.structs.replace(problem, dtype=Dtype.FP32)


def joined(verdicts: list[Verdict]) -> Verdict:
    """Returns one verdict for several variants of a kernel."""
    worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.worst_ratio))
    whole = msgspec.structs.replace(worst, checks=sum(verdict.checks for verdict in verdicts))
    if not whole.passed:
        return whole
    named = (name for verdict in verdicts for name in verdict.probes or ())
    return msgspec.structs.replace(whole, probes=tuple(dict.fromkeys(named)))


def _variants(
    problem: Problem, specialization: Specialization, level: Level
) -> Iterator[tuple[Problem, Specialization]]:
    yield problem, specialization
    if level is not Level.STRICT:
        return
    yield problem, msgspec.structs.replace(specialization, lse=not specialization.lse)
    if problem.is_backward and problem.bias is Bias.ADDITIVE:
        constant = msgspec.UNSET if specialization.constant_bias is True else True
        yield problem, msgspec.structs.replace(specialization, constant_bias=constant)
    if problem.causal is not Causal.NONE:
        other = Causal.TOP_LEFT if problem.causal is Causal.BOTTOM_RIGHT else Causal.BOTTOM_RIGHT
        yield msgspec.structs.replace(problem, causal=other), specialization


def _planned(
    kernel: Kernel, problem: Problem, config: Config, target: Target, level: Level, seed: int
) -> tuple[tuple[Case, int], ...]:
    """Returns the cases of a level that the kernel's family supports, which may limit the queries."""
    planned = tuple(planned_cases(kernel, problem, config, level, seed))
    if not problem.features and not splits_of(config):
        return planned
    family, tensors = find_family(kernel.family), kernel.specialization
    supported = tuple(
        pair for pair in planned if unsupported_reason(family, pair[0].problem, target, tensors) is None
    )
    if not supported:
        raise KernelError(
            f"{kernel.family} computes no problem of the verification: verify it at another problem"
        )
    return supported


def _verdict(findings: list[Finding], figures: list[float], device: str, seed: int) -> Verdict:
    failed = ""
    worst = 0.0
    for finding, figure in zip(findings, figures, strict=True):
        if finding.limit:
            worst = max(worst, figure if math.isfinite(figure) else NOT_FINITE)
        if not failed and not figure <= finding.limit:
            failed = f"{finding.what} {figure:.4g} of {finding.limit:g} allowed, seed {seed}"
    return Verdict(not failed, min(worst, NOT_FINITE), len(findings), failed, device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs the CPU work of the calling thread single-threaded. Other threads are not affected.

    On busy cores, 0.1 ms of comparisons took 8 to 20 ms with two threads, because each thread waits for
    threads without a core.
    """
    # A thread takes its count from the process at its first use of torch, and setting it sets the process's
    # count too. So the previous count of the process is restored at once, for threads that start meanwhile.
    own = torch.get_num_threads()
    others = _in_a_new_thread(torch.get_num_threads)

    def share(count: int) -> None:
        torch.set_num_threads(count)
        _in_a_new_thread(lambda: torch.set_num_threads(others))

    share(1)
    try:
        yield
    finally:
        share(own)


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def preload(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    enough: Callable[[], bool],
) -> None:
    """Runs one case of each probe as a self-check does, without launches, and discards the findings.

    The kernel need not be compiled. `enough` is called before each case, and ends the run if it returns True.
    """
    findings: list[Finding] = []
    met: set[Probe] = set()
    with one_thread():
        for case, _ in planned_cases(kernel, problem, config, Level.QUICK, SEED):
            if enough():
                return
            if case.probe not in met:
                met.add(case.probe)
                findings += case_findings(
                    kernel, None, case, SEED, target, device, keep=False, launched=False
                )
        read_figures(findings)
