"""Jobs of the GPU process: verify and measure a candidate, time the finalists.

A process with a broken CUDA context cannot be used again. It exits with a code for the error, and the
pool starts a new process.
"""

import functools
import os
import time
from typing import NoReturn

import torch

from flashtune.bundle.driver import Driver
from flashtune.core.errors import BundleError, KernelError, MachineError, ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.machine import machine_errors
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome
from flashtune.core.target import Target
from flashtune.dispatch.versions import current_versions
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_binding import BundledBinary, load_entry
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.compilation import first_line
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import MAX_MESSAGE
from flashtune.tuner.execution.evaluation import Evaluation, MachineCode, lost_device
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.processes import lacked_memory
from flashtune.tuner.execution.timed_runs import kernel_run, run_finals
from flashtune.tuner.execution.timing import clock_probe, measure, on_gpu, once
from flashtune.verification.cases import Level
from flashtune.verification.check import check_delayed, check_kernel, check_rendered, preload
from flashtune.verification.passes import forget

# Errors that break a CUDA context. Each has an exit code.
FATAL_ERRORS = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "device-side assert",
)
FATAL_EXIT = 64
OTHER_FATAL_EXIT = FATAL_EXIT + len(FATAL_ERRORS)
# Message of a record that was too slow for the full verification.
UNPROVEN = "right on small problems, and too slow to be proven at this size"
# Prefix of messages about schedule fuzzing.
DELAYED = "delayed: "
# Largest share of a GPU's memory for other programs and this one's context.
MAX_OF_OTHERS = 0.25
# The pool is notified of a job's start a moment after the worker takes it. The exit must come later.
EXIT_DELAY = 0.5


def fatal_error(exit_code: int) -> str | None:
    """Returns the CUDA error for an exit code of a GPU process, or None."""
    index = exit_code - FATAL_EXIT
    return FATAL_ERRORS[index] if 0 <= index < len(FATAL_ERRORS) else None


@functools.cache
def prepare(device: int) -> None:
    """Initialises the GPU, once per process, and the clock probe that every measurement needs."""
    try:
        torch.cuda.set_device(device)
        clock_probe(device)
    except (RuntimeError, AssertionError) as error:
        raise lost_device(device, first_line(error)) from error


@machine_errors()
def warm_up(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target, index: int
) -> None:
    """Initialises the GPU, and does what a first verification does before its launches."""
    prepare(index)
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    device = torch.device("cuda", index)
    try:
        preload(kernel, problem, candidate.config, target, device, enough=lambda: False)
    except RuntimeError as error:
        leave_if_broken(device, error)


@machine_errors()
def evaluate_candidate(
    problem: Problem,
    candidate: Candidate,
    specialization: Specialization,
    target: Target,
    index: int,
    drop_above_ms: float | None,
) -> Evaluation:
    """Verifies a candidate and measures it if it is correct. Exits the process if the CUDA context broke.

    A candidate slower than `drop_above_ms` is verified only on small problems: one of its launches may
    take longer than the whole verification of another. It has a time and no verdict, so that it is never
    selected.
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
        pruned = drop_above_ms is not None and once(run, device) > drop_above_ms
        verdict = prove(Level.QUICK if pruned else Level.FULL)
        if not verdict.passed:
            return Evaluation(Outcome.WRONG_RESULT, verdict, message=verdict.failed)
        throttled = clock_probe(index).is_throttled()
        timed = measure(run, device, drop_above_ms=drop_above_ms, throttled=throttled)
        (measurement,) = on_gpu([timed], device)
        if pruned and drop_above_ms is not None:
            if measurement.ms > drop_above_ms:
                return Evaluation(Outcome.OK, None, measurement, UNPROVEN)
            # The first time was an outlier. Kernels that can be selected need the full verification.
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
def evaluate_late(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target, index: int
) -> Evaluation:
    """Verifies a candidate with schedule fuzzing. Exits the process if the CUDA context broke."""
    prepare(index)
    device = torch.device("cuda", index)
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    # Free the cached inputs of earlier verifications.
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


@machine_errors()
def machine_code_of(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target, index: int
) -> MachineCode:
    """Returns a verified candidate as an entry of a bundle, after a short verification of the entry's launch.

    Returns nothing if bundles cannot express the launch or the entry fails. Exits the process if the CUDA
    context broke.
    """
    prepare(index)
    device = torch.device("cuda", index)
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    ptxas = current_versions(candidate.family).ptxas
    try:
        entry, codes = entry_of(kernel, problem, compile_binary(kernel, target), ptxas)
        driver = Driver()
        binary = BundledBinary(entry, load_entry(entry, codes.__getitem__, driver, device), driver)
        verdict = check_rendered(
            kernel, problem, candidate.config, target, device, Level.QUICK, compiled=binary
        )
    except MachineError:
        raise
    except (BundleError, KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        return ()
    return ((entry, codes),) if verdict.passed else ()


def _roomy_tensors(problem: Problem, device: torch.device, lse: bool) -> Tensors:
    """Makes the tensors of a problem. Cached inputs of earlier verifications are freed if memory is short."""
    try:
        return make_tensors(problem, device, lse=lse)
    except torch.OutOfMemoryError:
        forget()
        torch.cuda.empty_cache()
    try:
        return make_tensors(problem, device, lse=lse)
    except torch.OutOfMemoryError as error:
        _refuse_without_memory(device, error)
        raise ProblemError(
            f"the memory of GPU {device.index} cannot hold the tensors of {problem.key}: name smaller shapes"
        ) from error


def _refuse_without_memory(device: torch.device, error: Exception) -> None:
    """Raises if a kernel ran out of GPU memory because other programs hold much of it."""
    if not lacked_memory(str(error)):
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > MAX_OF_OTHERS * total:
        raise lost_device(device.index, f"other programs hold {others / 2**30:.0f} GiB of its memory")


@machine_errors()
def time_finalists(
    problem: Problem,
    candidates: tuple[Candidate, ...],
    specialization: Specialization,
    target: Target,
    index: int,
    closest_seconds: float,
) -> tuple[Measurement, ...]:
    """Times the finalists; returns an empty tuple on failure. Exits the process if the CUDA context broke."""
    prepare(index)
    device = torch.device("cuda", index)
    try:
        return run_finals(
            problem, candidates, specialization, target, device, closest_seconds=closest_seconds
        )
    except MachineError:
        raise
    except (KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        return ()


def leave_if_broken(device: torch.device, error: Exception) -> None:
    """Exits this process if an error broke the CUDA context."""
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
