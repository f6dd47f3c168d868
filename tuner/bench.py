"""Side by side in one run: the selected generated kernel, SDPA's backends, the standard computation.

Only right results are timed: each contestant's output is first held against the float64 reference
by the gate that candidates of a search must pass.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor

import flashtune
from flashtune.errors import TargetError, UsageError
from flashtune.problem import Problem
from flashtune.proof.gate import worst_ratio
from flashtune.proof.reference import Expected, Sample, expect, sample
from flashtune.record import Measurement, Versions
from flashtune.target import device_target
from flashtune.tuner.finals import Tensors, make_tensors, peer_runs
from flashtune.tuner.measurement import measure_interleaved
from flashtune.versions import current_versions

if TYPE_CHECKING:
    from flashtune.api import CausalOption

OURS = "flashtune"
ROUNDS = 21
# Host time is that of queueing: the device is kept busy for longer than a batch of calls takes.
HOST_ROUNDS = 5
HOST_CALLS = 20
HOST_PAUSE_CYCLES = 10_000_000
SEED = 0

Call = Callable[[], object]


class Row(msgspec.Struct, frozen=True):
    """One contestant's figures.

    Attributes:
        name: `flashtune`, or the peer's name as records have it.
        detail: Which kernel, for ours.
        ms: Median GPU time of a CUDA-graph replay with a cold L2.
        p20: 20th percentile, in ms.
        p80: 80th percentile, in ms.
        tflops: TFLOP/s by `Problem.nominal_flops`.
        host_us: Median host time of queueing one call, in microseconds.
        error: Largest row error over what the gate allows (1.0 is the limit).
    """

    name: str
    detail: str
    ms: float
    p20: float
    p80: float
    tflops: float
    host_us: float
    error: float


class LeftOut(msgspec.Struct, frozen=True):
    """A contestant whose output is not what it should be, with its error as in `Row`."""

    name: str
    error: float


class Bench(msgspec.Struct, frozen=True):
    """All contestants at one problem on one GPU, timed in turn."""

    problem: Problem
    target: str
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    rounds: int
    throttled: bool
    versions: Versions


class Contestant(msgspec.Struct, frozen=True):
    """One implementation bound to the inputs.

    Attributes:
        name: As in `Row`.
        detail: As in `Row`.
        run: What is captured and replayed: everything resolved before.
        call: What a program would write, whose host time is taken.
    """

    name: str
    detail: str
    run: Call
    call: Call


def run_bench(problem: Problem, index: int, *, peers: bool = True, rounds: int = ROUNDS) -> Bench:
    """Times the contestants at one problem.

    Args:
        problem: What to compute.
        index: Which GPU.
        peers: Whether SDPA's backends and the standard computation take part.
        rounds: Samples of each contestant.

    Raises:
        TargetError: There is no such GPU.
        UsageError: There is nothing to compute.
        KernelError: The selected kernel fails on this GPU.
    """
    if not torch.cuda.is_available():
        raise TargetError(
            "bench times kernels and no GPU is visible here: run it on a machine with one, or let "
            "flashtune explain --target NAME predict"
        )
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
        raise UsageError(f"{problem.key} has nothing to compute: give it a batch and lengths above zero")
    target = device_target(index)
    device = torch.device("cuda", index)
    with torch.cuda.device(device), torch.no_grad():
        tensors = make_tensors(problem, device)
        ours, family_name = _ours(problem, tensors)
        others = (
            [Contestant(name, "", run, run) for name, run in peer_runs(problem, tensors)] if peers else []
        )
        errors = _errors(problem, tensors, [ours, *others])
        judged = list(zip([ours, *others], errors, strict=True))
        right = [(contestant, error) for contestant, error in judged if error <= 1]
        graphs = [_capture(contestant.run) for contestant, _ in right]
        measured = measure_interleaved([graph.replay for graph in graphs], device, rounds=rounds)
        del graphs
        hosts = host_times([contestant.call for contestant, _ in right], device)
    return Bench(
        problem,
        target.name,
        tuple(
            _row(problem, contestant, error, measurement, host)
            for (contestant, error), measurement, host in zip(right, measured, hosts, strict=True)
        ),
        tuple(LeftOut(contestant.name, error) for contestant, error in judged if not error <= 1),
        rounds,
        any(measurement.throttled for measurement in measured),
        current_versions(family_name),
    )


def _ours(problem: Problem, tensors: Tensors) -> tuple[Contestant, str]:
    """The kernel that dispatch selects, no baseline in its place, and its family."""
    inputs = (tensors.q, tensors.k, tensors.v)
    causal = cast("CausalOption", problem.causal.value)
    selection = flashtune.explain(*inputs, causal=causal, prefer="generated").selection
    assert selection is not None
    record = selection.record
    label = record.config.label() if record.config else ""
    planned = flashtune.plan(*inputs, causal=causal, prefer="generated")
    contestant = Contestant(
        OURS,
        f"{record.family} {label} ({selection.source})",
        functools.partial(planned, *inputs),
        functools.partial(flashtune.attention, *inputs, causal=causal, prefer="generated"),
    )
    return contestant, record.family


def _errors(problem: Problem, tensors: Tensors, contestants: Sequence[Contestant]) -> list[float]:
    """Each contestant's largest row error over what is allowed."""
    chosen = sample(problem, torch.Generator(tensors.q.device).manual_seed(SEED))
    expected = expect(problem, tensors.q, tensors.k, tensors.v, tensors.scale, chosen)
    return [error_of(contestant.run(), chosen, expected) for contestant in contestants]


def error_of(result: object, chosen: Sample, expected: Expected) -> float:
    """The largest row error of a result over what is allowed; infinite where anything is not finite.

    Args:
        result: The output [batch, heads, seqlen_q, value_head_dim], or a tuple that starts with it.
        chosen: The rows that are compared.
        expected: The reference at these rows.
    """
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    rows = out.flatten(0, 1)[chosen.heads][:, chosen.rows]
    ratio = float(worst_ratio(rows, expected.out, expected.allowed))
    return math.inf if math.isnan(ratio) else ratio


def _capture(run: Call) -> torch.cuda.CUDAGraph:
    """One run as a graph, so that no host time is in a sample."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    return graph


def host_times(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Median host time of queueing each call, in microseconds, taken in turn."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(HOST_ROUNDS):
        for call, times in zip(calls, samples, strict=True):
            call()
            torch.cuda.synchronize(device)
            torch.cuda._sleep(HOST_PAUSE_CYCLES)
            start = time.perf_counter_ns()
            for _ in range(HOST_CALLS):
                call()
            times.append((time.perf_counter_ns() - start) / HOST_CALLS / 1e3)
    torch.cuda.synchronize(device)
    return [statistics.median(times) for times in samples]


def _row(
    problem: Problem, contestant: Contestant, error: float, measurement: Measurement, host: float
) -> Row:
    return Row(
        contestant.name,
        contestant.detail,
        measurement.ms,
        measurement.p20,
        measurement.p80,
        problem.nominal_flops() / measurement.ms / 1e9,
        host,
        error,
    )
