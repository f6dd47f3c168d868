"""What the GPU's own process does: verify a candidate, measure it, time the finalists.

A process whose CUDA context broke is of no more use; it leaves with an exit code that says why, and
another takes its place.
"""

from __future__ import annotations

import functools
import os
import time
from typing import NoReturn

import torch

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Specialization
from flashtune.core.machine import machine_errors
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome
from flashtune.core.target import Target
from flashtune.launch.compilation import first_line
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import MAX_MESSAGE, compile_kernel
from flashtune.tuner.execution.evaluation import Evaluation, lost_device
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.processes import lacked_memory
from flashtune.tuner.execution.timed_runs import kernel_run, run_finals
from flashtune.tuner.execution.timing import clock_probe, measure, once
from flashtune.verification.cases import Level
from flashtune.verification.check import check_delayed, check_kernel
from flashtune.verification.passes import forget
from flashtune.verification.schedule_fuzzing import delayed

# Errors after which a CUDA context is of no more use, each with an exit code of its own.
FATAL_ERRORS = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "device-side assert",
)
FATAL_EXIT = 64
OTHER_FATAL_EXIT = FATAL_EXIT + len(FATAL_ERRORS)
# What a record says that was too slow for the full proof.
UNPROVEN = "right on small problems, and too slow to be proven at this size"
# Before what is said of a kernel whose warps fell behind.
DELAYED = "delayed: "
# Of a GPU's memory, the share that other programs and this one's context may hold.
MOST_OF_OTHERS = 0.25
# The pool learns of a job's start a moment after the worker; an exit must not overtake that news.
EXIT_DELAY = 0.5


def fatal_error(exit_code: int) -> str | None:
    """What a process that left with an exit code met, if that says so."""
    index = exit_code - FATAL_EXIT
    return FATAL_ERRORS[index] if 0 <= index < len(FATAL_ERRORS) else None


@functools.cache
def prepare(device: int) -> None:
    """Takes the GPU, once per process, and makes what every measurement needs.

    Raises:
        DeviceLostError: The GPU cannot be used.
    """
    try:
        torch.cuda.set_device(device)
        clock_probe(device)
    except (RuntimeError, AssertionError) as error:
        raise lost_device(device, first_line(error)) from error


@machine_errors()
def evaluate_candidate(
    problem: Problem,
    candidate: Candidate,
    specialization: Specialization,
    target: Target,
    index: int,
    drop_above_ms: float | None,
) -> Evaluation:
    """Verifies a candidate and measures it if it is right. Leaves the process if the GPU's context broke.

    What is slower than `drop_above_ms` is held against the reference on small problems alone, since
    each launch at full size may take longer than the whole proof of another candidate. That is no
    proof at its own size: it keeps its time and no verdict, so that nothing ever selects it.

    Raises:
        MachineError: The machine failed, as with a full disk.
        DeviceLostError: The GPU cannot be used.
    """
    prepare(index)
    device = torch.device("cuda", index)
    family = find_family(candidate.family)
    tensors = _roomy_tensors(problem, device, specialization.lse)
    verdict = None
    try:
        run = kernel_run(problem, candidate, specialization, target, tensors)
        prove = functools.partial(
            check_kernel, family, problem, candidate.config, specialization, target, device
        )
        hopeless = drop_above_ms is not None and once(run, device) > drop_above_ms
        verdict = prove(Level.QUICK if hopeless else Level.FULL)
        if not verdict.passed:
            return Evaluation(Outcome.WRONG_RESULT, verdict, message=verdict.failed)
        throttled = clock_probe(index).is_throttled()
        measurement = measure(run, device, drop_above_ms=drop_above_ms, throttled=throttled)
        if hopeless and drop_above_ms is not None:
            if measurement.ms > drop_above_ms:
                return Evaluation(Outcome.OK, None, measurement, UNPROVEN)
            # The first launch was a hiccup: a kernel that can be selected owes the full proof.
            verdict = prove(Level.FULL)
            if not verdict.passed:
                return Evaluation(Outcome.WRONG_RESULT, verdict, message=verdict.failed)
        return Evaluation(Outcome.OK, verdict, measurement)
    except MachineError:
        raise
    except (KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        _refuse_without_memory(device, error)
        return Evaluation(Outcome.LAUNCH_ERROR, verdict, message=str(error)[:MAX_MESSAGE])


@machine_errors()
def build_late(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> bool:
    """Compiles a candidate with warps that fall behind; whether that can be launched.

    It cannot where the kernel leaves waiting to the compiler; nor where the one with delays, which is
    another, does not compile or fit: that says nothing of the candidate.

    Raises:
        MachineError: The machine failed, as with a full disk.
    """
    late = delayed(render(find_family(candidate.family), problem, candidate.config, specialization))
    return late is not None and compile_kernel(late, target).outcome is Outcome.OK


@machine_errors()
def evaluate_late(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target, index: int
) -> Evaluation:
    """Verifies a candidate with warps that fall behind. Leaves the process if the GPU's context broke.

    Raises:
        MachineError: The machine failed, as with a full disk.
        DeviceLostError: The GPU cannot be used.
    """
    prepare(index)
    device = torch.device("cuda", index)
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    # What other candidates' proofs kept is of no more use.
    forget()
    torch.cuda.empty_cache()
    try:
        verdict = check_delayed(kernel, problem, candidate.config, target, device)
    except MachineError:
        raise
    except (KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        _refuse_without_memory(device, error)
        return Evaluation(Outcome.LAUNCH_ERROR, message=f"{DELAYED}{error}"[:MAX_MESSAGE])
    assert verdict is not None
    outcome = Outcome.OK if verdict.passed else Outcome.WRONG_RESULT
    return Evaluation(outcome, verdict, message=verdict.failed)


def _roomy_tensors(problem: Problem, device: torch.device, lse: bool) -> Tensors:
    """Tensors of a problem, with room for the log-sum-exp or not; what earlier proofs kept gives way to them.

    Raises:
        DeviceLostError: The GPU's memory cannot hold them: no candidate's fault.
    """
    try:
        return make_tensors(problem, device, lse=lse)
    except torch.OutOfMemoryError:
        forget()
        torch.cuda.empty_cache()
    try:
        return make_tensors(problem, device, lse=lse)
    except torch.OutOfMemoryError as error:
        raise lost_device(device.index, "its memory cannot hold the problem's tensors") from error


def _refuse_without_memory(device: torch.device, error: Exception) -> None:
    """Raises if a kernel ran out of GPU memory because other programs hold much of it.

    Raises:
        DeviceLostError: They hold more than a quarter of it.
    """
    if not lacked_memory(str(error)):
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > MOST_OF_OTHERS * total:
        raise lost_device(device.index, f"other programs hold {others / 2**30:.0f} GiB of its memory")


@machine_errors()
def time_finalists(
    problem: Problem,
    candidates: tuple[Candidate, ...],
    specialization: Specialization,
    target: Target,
    index: int,
) -> tuple[Measurement, ...]:
    """The finals; nothing where they failed. Leaves the process if the GPU's context broke.

    Raises:
        MachineError: The machine failed, as with a full disk.
        DeviceLostError: The GPU cannot be used.
    """
    prepare(index)
    device = torch.device("cuda", index)
    try:
        return run_finals(problem, candidates, specialization, target, device)
    except MachineError:
        raise
    except (KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        return ()


def leave_if_broken(device: torch.device, error: Exception) -> None:
    """Ends this process if the GPU's context is of no more use after an error."""
    text = str(error).lower()
    for code, words in enumerate(FATAL_ERRORS):
        if words in text:
            _leave(FATAL_EXIT + code)
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        _leave(OTHER_FATAL_EXIT)


def _leave(code: int) -> NoReturn:
    time.sleep(EXIT_DELAY)
    os._exit(code)
