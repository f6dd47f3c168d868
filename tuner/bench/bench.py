"""Times the selected generated kernel, SDPA's backends and other baselines in one run.

Only correct results are timed. Each contestant's output or gradients are first compared with the float64
reference, under the tolerance that candidates of a search must meet. Times are those of graph replays,
without host time. Samples of a problem's contestants are interleaved, each after the same flush of the L2.
"""

import functools
import statistics
import time
from collections.abc import Sequence

import torch

from flashtune.core.errors import TargetError, UsageError
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement
from flashtune.core.target import Target, device_target
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.bench import backward
from flashtune.tuner.bench.admission import Admitted, Bind, admit, capture, capture_here
from flashtune.tuner.bench.calls import bind_program, program_call, require_call, selected
from flashtune.tuner.bench.judging import output_judge
from flashtune.tuner.bench.peer_runs import PEERS, Call, Contestant, bind_peer
from flashtune.tuner.bench.results import OURS, Bench, LeftOut, Row
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.sdpa import precision_of
from flashtune.tuner.execution.timing import clock_mhz, measure_interleaved, measure_sustained
from flashtune.tuner.workloads.work import operations

ROUNDS = 21
# Host time is the time to queue calls: the device is kept busy for longer than a batch takes.
HOST_ROUNDS = 5
HOST_CALLS = 10
HOST_PAUSE_CYCLES = 10_000_000


def run_bench(
    problem: Problem,
    index: int,
    *,
    peers: Sequence[str] = PEERS,
    rounds: int = ROUNDS,
    sustained: bool = False,
) -> Bench:
    """Times the contestants at one problem: interleaved, or with `sustained` each alone."""
    require_gpu()
    require_work(problem)
    start = time.perf_counter()
    target = device_target(index)
    device = torch.device("cuda", index)
    setting = backward.recording(device) if problem.is_backward else torch.no_grad()
    with torch.cuda.device(device), precision_of(problem.dtype), setting:
        tensors = make_tensors(problem, device)
        admission = _admit_gradients if problem.is_backward else _admit_outputs
        family_name, entries = admission(problem, tensors, peers, target)
        admitted = [entry for entry in entries if isinstance(entry, Admitted)]
        replays = [entry.replay for entry in admitted]
        if sustained:
            measured = measure_sustained(replays, device)
        else:
            measured = measure_interleaved(replays, device, rounds=rounds)
        clock = clock_mhz(device)
        hosts = host_times([entry.contestant for entry in admitted], device)
    return Bench(
        problem=problem,
        target=target.name,
        rows=tuple(
            _row(problem, entry, measurement, host)
            for entry, measurement, host in zip(admitted, measured, hosts, strict=True)
        ),
        left_out=tuple(entry for entry in entries if isinstance(entry, LeftOut)),
        rounds=min((measurement.samples for measurement in measured), default=0),
        throttled=any(measurement.throttled for measurement in measured),
        clock_mhz=clock,
        seconds=time.perf_counter() - start,
        versions=current_versions(family_name),
        sustained=sustained,
    )


def require_gpu() -> None:
    """Checks that a GPU is visible."""
    if not torch.cuda.is_available():
        raise TargetError(
            "bench times kernels and no GPU is visible here: run it on a machine with one, or let "
            "flashtune explain --target NAME predict"
        )


def require_work(problem: Problem) -> None:
    """Checks that the problem can be timed."""
    require_call(problem)
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
        raise UsageError(f"{problem.key} has nothing to compute: give it a batch and lengths above zero")


def _admit_outputs(
    problem: Problem, tensors: Tensors, peers: Sequence[str], target: Target
) -> tuple[str, list[Admitted | LeftOut]]:
    """Returns the selected kernel's family, and the contestants of a forward problem."""
    del target  # the call knows it
    call = program_call(problem, tensors)
    family_name, detail = selected(call)
    binders: dict[str, Bind] = {OURS: functools.partial(bind_program, call, detail)}
    binders |= {name: functools.partial(bind_peer, name, problem, tensors) for name in peers}
    return family_name, admit(binders, output_judge(problem, tensors), capture)


def _admit_gradients(
    problem: Problem, tensors: Tensors, peers: Sequence[str], target: Target
) -> tuple[str, list[Admitted | LeftOut]]:
    """Returns the selected kernels' family, and the contestants of a backward problem."""
    family_name, detail = backward.selected(problem, target)
    binders = backward.gradient_binders(problem, tensors, detail, peers)
    return family_name, admit(binders, backward.gradient_judge(problem, tensors), capture_here)


def host_times(contestants: Sequence[Contestant], device: torch.device) -> list[float]:
    """Returns the median host time of queueing each contestant's call, in microseconds, interleaved."""
    samples: list[list[float]] = [[] for _ in contestants]
    for _ in range(HOST_ROUNDS):
        for contestant, times in zip(contestants, samples, strict=True):
            with contestant.setting():
                times.append(_host_time(contestant.call, device))
    torch.cuda.synchronize(device)
    return [statistics.median(times) for times in samples]


def _host_time(call: Call, device: torch.device) -> float:
    """Returns the host time of one call in microseconds, from a batch that is only queued."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(HOST_PAUSE_CYCLES)
    start = time.perf_counter_ns()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter_ns() - start) / HOST_CALLS / 1e3


def _row(problem: Problem, entry: Admitted, measurement: Measurement, host: float) -> Row:
    return Row(
        name=entry.contestant.name,
        detail=entry.contestant.detail,
        ms=measurement.ms,
        p20=measurement.p20,
        p80=measurement.p80,
        tflops=operations(problem) / measurement.ms / 1e9,
        host_us=host,
        error=entry.error,
    )
