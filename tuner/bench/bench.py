"""Times the selected generated kernel, SDPA's backends and other baselines in one run.

Only correct results are timed. Each contestant's output or gradients are first compared with the float64
reference, under the tolerance that candidates of a search must meet. Times are those of graph replays,
without host time. Samples of a problem's contestants are interleaved, each after the same flush of the L2.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import TargetError, UsageError
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.problem import Feature, Problem
from flashtune.core.record import Measurement
from flashtune.core.target import Target, device_target
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.bench import backward
from flashtune.tuner.bench.admission import Admitted, Bind, Judge, admit, capture, capture_here
from flashtune.tuner.bench.ceiling import clock_mhz
from flashtune.tuner.bench.peer_runs import PEERS, Call, Contestant, bind_peer
from flashtune.tuner.bench.results import OURS, Bench, LeftOut, Row
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.timing import measure_interleaved
from flashtune.verification.reference.forward import Expected, Sample, expect, sample
from flashtune.verification.tolerance import worst_ratio

ROUNDS = 21
# Host time is the time to queue calls: the device is kept busy for longer than a batch takes.
HOST_ROUNDS = 5
HOST_CALLS = 10
HOST_PAUSE_CYCLES = 10_000_000
SEED = 0


def run_bench(problem: Problem, index: int, *, peers: Sequence[str] = PEERS, rounds: int = ROUNDS) -> Bench:
    """Times the contestants at one problem.

    Raises:
        TargetError: There is no such GPU.
        ProblemError: No family computes the problem on this GPU.
        UsageError: The problem is empty, or cannot be benchmarked.
    """
    require_gpu()
    require_work(problem)
    start = time.perf_counter()
    target = device_target(index)
    device = torch.device("cuda", index)
    setting = backward.recording(device) if problem.is_backward else torch.no_grad()
    with torch.cuda.device(device), setting:
        tensors = make_tensors(problem, device)
        admission = _admit_gradients if problem.is_backward else _admit_outputs
        family_name, entries = admission(problem, tensors, peers, target)
        admitted = [entry for entry in entries if isinstance(entry, Admitted)]
        measured = measure_interleaved([entry.replay for entry in admitted], device, rounds=rounds)
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
        rounds=rounds,
        throttled=any(measurement.throttled for measurement in measured),
        clock_mhz=clock,
        seconds=time.perf_counter() - start,
        versions=current_versions(family_name),
    )


def require_gpu() -> None:
    """Checks that a GPU is visible.

    Raises:
        TargetError: No GPU is visible.
    """
    if not torch.cuda.is_available():
        raise TargetError(
            "bench times kernels and no GPU is visible here: run it on a machine with one, or let "
            "flashtune explain --target NAME predict"
        )


def require_work(problem: Problem) -> None:
    """Checks that the problem can be timed.

    Raises:
        UsageError: The problem is empty, or has a feature that is not benchmarked.
    """
    # Baselines sum gradients in any order. They are compared all the same.
    benched = {Feature.DETERMINISTIC} if problem.is_backward else {Feature.BIAS}
    further = problem.features - benched
    if further:
        features = ", ".join(sorted(further))
        raise UsageError(
            f"bench times no {features} so far: leave {problem.key} out, or search it for its time"
        )
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
        raise UsageError(f"{problem.key} has nothing to compute: give it a batch and lengths above zero")


def _admit_outputs(
    problem: Problem, tensors: Tensors, peers: Sequence[str], target: Target
) -> tuple[str, list[Admitted | LeftOut]]:
    """Returns the selected kernel's family, and the contestants of a forward problem."""
    del target  # the call knows it
    family_name, detail = _selected(problem, tensors)
    binders: dict[str, Bind] = {OURS: functools.partial(_ours, problem, tensors, detail)}
    binders |= {name: functools.partial(bind_peer, name, problem, tensors) for name in peers}
    return family_name, admit(binders, _judge(problem, tensors), capture)


def _admit_gradients(
    problem: Problem, tensors: Tensors, peers: Sequence[str], target: Target
) -> tuple[str, list[Admitted | LeftOut]]:
    """Returns the selected kernels' family, and the contestants of a backward problem."""
    family_name, detail = backward.selected(problem, target)
    binders = backward.gradient_binders(problem, tensors, detail, peers)
    return family_name, admit(binders, backward.gradient_judge(problem, tensors), capture_here)


def _selected(problem: Problem, tensors: Tensors) -> tuple[str, str]:
    """Returns the family and description of the kernel that dispatch selects, never a baseline."""
    explanation = flashtune.explain(tensors.q, tensors.k, tensors.v, **_options(problem, tensors))
    assert explanation.selection is not None
    record = explanation.selection.record
    label = record.config.label() if record.config else ""
    return record.family, f"{record.family} {label} ({explanation.selection.source})"


def _ours(problem: Problem, tensors: Tensors, detail: str) -> Contestant:
    inputs = (tensors.q, tensors.k, tensors.v)
    options = _options(problem, tensors)
    planned = flashtune.plan(*inputs, **options)
    run = functools.partial(planned, *inputs, **side_options(tensors))
    return Contestant(OURS, detail, run, functools.partial(flashtune.attention, *inputs, **options))


def _options(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """Returns the options of a program's call that force the generated kernel, even if it is slower."""
    return {"causal": problem.causal.value, "prefer": "generated", **side_options(tensors)}


def side_options(tensors: Tensors) -> dict[str, Any]:
    """Returns scales of quantised inputs and the bias or mask as arguments; none if there are none."""
    bias = tensors.side.bias
    if bias is not None:
        return {"attn_mask" if bias.dtype is torch.bool else "attn_bias": bias}
    q, k, v = tensors.side.scales
    return {} if tensors.side is NO_EXTRA_INPUTS else {"q_scale": q, "k_scale": k, "v_scale": v}


def _judge(problem: Problem, tensors: Tensors) -> Judge:
    """Compares an output with the reference at sampled rows, the same for all contestants."""
    chosen = sample(problem, torch.Generator(tensors.q.device).manual_seed(SEED))
    inputs = (tensors.q, tensors.k, tensors.v)
    expected = expect(problem, *inputs, tensors.scale, chosen, tensors.side)
    return functools.partial(error_of, chosen=chosen, expected=expected)


def error_of(result: object, chosen: Sample, expected: Expected) -> float:
    """Returns the largest row error of a result as a multiple of the tolerance, infinite if not finite.

    The result is the output, or a tuple that starts with it.
    """
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    batch = (chosen.heads // out.shape[1])[:, None]
    head = (chosen.heads % out.shape[1])[:, None]
    ratio = float(worst_ratio(out[batch, head, chosen.rows], expected.out, expected.allowed))
    return math.inf if math.isnan(ratio) else ratio


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
        tflops=problem.nominal_flops() / measurement.ms / 1e9,
        host_us=host,
        error=entry.error,
    )
