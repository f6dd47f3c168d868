"""Worker processes for a tabular benchmark: they describe binaries, and verify and time batches."""

from collections.abc import Iterator

import msgspec
import torch

from benchmarks.exhaustive.inner_loop import Loop, read_loop
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome
from flashtune.core.target import Target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import MAX_MESSAGE, Compiled, compile_candidate
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.execution.gpu_jobs import leave_if_broken, prepare
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.execution.timing import Run, measure_interleaved
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel

ROUNDS = 9


class Described(msgspec.Struct, frozen=True):
    """The result of compiling a candidate, and the inner loop of the kernel."""

    compiled: Compiled
    loop: Loop | None = None


class Batch(msgspec.Struct, frozen=True):
    """Interleaved candidates: the result of each, and the time of the anchor in ms."""

    evaluations: tuple[Evaluation, ...]
    anchor_ms: float


def describe_candidate(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> Described:
    """Compiles a candidate as a search does, and reads its inner loop."""
    compiled = compile_candidate(problem, candidate, specialization, target)
    if compiled.resources is None or not target.is_nvidia:
        return Described(compiled)
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    # Triton's cache has the binary.
    return Described(compiled, read_loop(compile_kernel(kernel, target).asm["cubin"]))


def measure_batch(
    problem: Problem,
    anchor: Candidate,
    candidates: tuple[Candidate, ...],
    specialization: Specialization,
    target: Target,
    index: int,
) -> Batch:
    """Verifies candidates on small problems, and times the correct ones interleaved.

    The anchor is timed with them, so that batches can be compared. The process exits if the GPU's context is
    broken; the caller then retries the candidates one by one.
    """
    prepare(index)
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        tensors = make_tensors(problem, device)
        runs = [kernel_run(problem, anchor, specialization, target, tensors)]
        judged = [_judged(problem, candidate, specialization, target, tensors) for candidate in candidates]
        runs += [entry for entry in judged if not isinstance(entry, Evaluation)]
        measured = iter(measure_interleaved(runs, device, rounds=ROUNDS))
        anchor_ms = next(measured).ms
        return Batch(tuple(_joined(judged, measured)), anchor_ms)


def _judged(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target, tensors: Tensors
) -> Evaluation | Run:
    """How a candidate failed, or its launch where it is right."""
    device = tensors.q.device
    try:
        run = kernel_run(problem, candidate, specialization, target, tensors)
        family = find_family(candidate.family)
        verdict = check_kernel(family, problem, candidate.config, specialization, target, device, Level.QUICK)
        if not verdict.passed:
            return Evaluation(Outcome.WRONG_RESULT, verdict, message=verdict.failed)
        run()
        torch.cuda.synchronize(device)
        return run
    except MachineError:
        raise
    except (KernelError, RuntimeError) as error:
        leave_if_broken(device, error)
        return Evaluation(Outcome.LAUNCH_ERROR, message=str(error)[:MAX_MESSAGE])


def _joined(judged: list[Evaluation | Run], measured: Iterator[Measurement]) -> Iterator[Evaluation]:
    for entry in judged:
        yield entry if isinstance(entry, Evaluation) else Evaluation(Outcome.OK, measurement=next(measured))
