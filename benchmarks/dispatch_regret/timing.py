"""Times the finalists of untuned shapes, each shape in one interleaved run. Needs a GPU."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.dispatch_regret.analysis import (
    SHARES,
    Point,
    RegretReport,
    Timed,
    dispatched,
    finalists,
    thinned,
)
from benchmarks.saved import write
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome, Record
from flashtune.core.target import Target, device_target
from flashtune.launch.binding import Binary, bind, compile_binary
from flashtune.launch.compilation import first_line
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import CompilePool
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.evaluation import lost_device
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.timing import Run, measure_interleaved, once, summarize

ROUNDS = 15
# A kernel that is slower than the best by this factor in one launch is timed no more, unless it was chosen.
HOPELESS = 1.5
# Tensors are as torch allocates them.
TENSORS = Specialization()

Told = Callable[[str], None]
Jobs = dict[Problem, tuple[Candidate, ...]]


def measure_regret(
    report: RegretReport,
    problems: Sequence[Problem],
    records: tuple[Record, ...],
    device: int,
    until: float,
    path: Path,
    tell: Told,
) -> RegretReport:
    """Adds points to a report until all problems are measured or time is up; each is written at once.

    Args:
        report: Earlier measurements; their problems are left out.
        problems: The problems to measure, in order.
        records: The table's.
        device: Index of the GPU.
        until: When to stop, by `time.monotonic`.
        path: Where to write.
        tell: Receives progress messages.
    """
    target = device_target(device)
    timed = {point.problem for point in report.points}
    left = [problem for problem in problems if problem not in timed]
    chosen = {problem: _choices(problem, target, records) for problem in left}
    jobs: Jobs = {
        problem: tuple(dict.fromkeys((*finalists(problem, target, records), *chosen[problem])))
        for problem in left
    }
    broken = compile_all(jobs, target, tell)
    for number, problem in enumerate(left, start=1):
        if time.monotonic() > until:
            tell(f"time is up: {len(left) - number + 1} shapes were not measured")
            break
        candidates = tuple(
            candidate for candidate in jobs[problem] if (problem.computation, candidate) not in broken
        )
        point = _measure(problem, candidates, chosen[problem], target, torch.device("cuda", device))
        report = msgspec.structs.replace(report, points=(*report.points, point))
        write(path, msgspec.json.encode(report))
        tell(f"{number}/{len(left)} {problem.key}: {len(point.timed)} configs, best {point.best.ms:.4f} ms")
    return report


def _choices(problem: Problem, target: Target, records: tuple[Record, ...]) -> tuple[Candidate, ...]:
    return tuple(dict.fromkeys(dispatched(target, problem, thinned(records, share)) for share in SHARES))


def compile_all(jobs: Jobs, target: Target, tell: Told) -> frozenset[tuple[Problem, Candidate]]:
    """Compiles all kernels on all cores, into Triton's cache.

    Returns:
        The kernels that cannot run, by their problem without lengths.
    """
    distinct = dict.fromkeys(
        (problem.computation, candidate) for problem, candidates in jobs.items() for candidate in candidates
    )
    started = time.monotonic()
    with CompilePool(available_cpus()) as pool:
        futures = {key: pool.submit(SearchTask(key[0], target, TENSORS, ()), key[1]) for key in distinct}
        broken = frozenset(key for key, job in futures.items() if job.result().outcome is not Outcome.OK)
    tell(
        f"{len(distinct)} kernels compiled in {time.monotonic() - started:.0f} s, {len(broken)} of them unfit"
    )
    return broken


@functools.cache
def _kernel(computation: Problem, candidate: Candidate) -> Kernel:
    return render(find_family(candidate.family), computation, candidate.config, TENSORS)


@functools.cache
def _binary(kernel: Kernel, target: Target) -> Binary:
    return compile_binary(kernel, target)


def _measure(
    problem: Problem,
    candidates: Sequence[Candidate],
    chosen: Sequence[Candidate],
    target: Target,
    device: torch.device,
) -> Point:
    """One look at each candidate, then all that are near the best, and dispatch's choices, in turn."""
    with torch.cuda.device(device):
        tensors = make_tensors(problem, device)
        runs: dict[Candidate, Run] = {}
        looks: dict[Candidate, float] = {}
        for candidate in candidates:
            try:
                runs[candidate] = _run(problem, candidate, target, tensors)
                looks[candidate] = once(runs[candidate], device)
            except KernelError:
                continue  # too large for this GPU: no finalist
            except RuntimeError as error:
                label = f"{candidate.family} {candidate.config.label()} at {problem.key}"
                raise lost_device(device.index, f"{label}: {first_line(error)}") from error
        limit = HOPELESS * min(looks.values())
        close = [candidate for candidate in looks if looks[candidate] <= limit or candidate in chosen]
        measured = measure_interleaved([runs[candidate] for candidate in close], device, rounds=ROUNDS)
    closely = dict(zip(close, measured, strict=True))
    return Point(
        problem, tuple(_timed(candidate, closely.get(candidate), looks[candidate]) for candidate in looks)
    )


def _run(problem: Problem, candidate: Candidate, target: Target, tensors: Tensors) -> Run:
    kernel = _kernel(problem.computation, candidate)
    binary = _binary(kernel, target)
    arguments = (tensors.q, tensors.k, tensors.v, tensors.out)
    launch = bind(kernel, target, ForwardTensors(*arguments), tensors.side, compiled=binary)
    return functools.partial(launch, (*arguments, None), tensors.scale, tensors.side)


def _timed(candidate: Candidate, measured: Measurement | None, look: float) -> Timed:
    measurement = measured or summarize([look])
    ms, p20, p80 = (round(value, 6) for value in (measurement.ms, measurement.p20, measurement.p80))
    return Timed(candidate.family, candidate.config.label(), ms, p20, p80, measurement.samples)
