"""The finals: interleaved timing of the best candidates and the baselines, in the GPU process."""

import functools
import warnings
from collections.abc import Iterator, Sequence

import msgspec
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import narrowed
from flashtune.core.problem import Problem, score_bytes
from flashtune.core.record import Measurement, PeerTime, SharedTime, is_tied
from flashtune.core.target import Target
from flashtune.dispatch.masked_sdpa import timed_ways
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.runtime.unfused import unfused_attention
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.inputs import Tensors, differentiable, gradient_run, make_tensors
from flashtune.tuner.execution.sdpa import BACKENDS, OTHER_LAYOUTS, precision_of, sdpa_run
from flashtune.tuner.execution.timing import (
    SUSTAINED_SECONDS,
    Run,
    measure_interleaved,
    measure_sustained,
    on_gpu,
)
from flashtune.tuner.workloads.models import forward_of

ROUNDS = 21
# Candidates within this factor of the fastest are timed again among themselves, for up to MORE_ROUNDS times
# the rounds and MORE_MS milliseconds: medians of 21 rounds on a hot GPU have an error of a percent.
CLOSE = 1.03
MORE_ROUNDS = 5
MORE_MS = 3000.0
# If the clock is held down, they are timed alone instead. So are launches of LONG_MS or more, which reach the
# power limit in use. Launches longer than SUSTAINED_MS are not. Both take at most CLOSEST_SECONDS in total.
CLOSEST_SECONDS = 15.0
LONG_MS = 1.0
SUSTAINED_MS = 25.0
# Unfused attention needs 2.5 times the memory of its scores, and some for the mask.
SCORE_COPIES = 3
# Its gradients need more: probabilities in two types, and the gradients of probabilities and scores.
GRADIENT_SCORE_COPIES = 6
MEMORY_SHARE = 0.5


def kernel_run(
    problem: Problem,
    candidate: Candidate,
    specialization: Specialization,
    target: Target,
    tensors: Tensors,
) -> Run:
    """Returns a callable that launches a candidate on these tensors."""
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    if tensors.backward is not None:
        backward = bind(kernel, target, tensors.backward, tensors.side)
        return functools.partial(backward, tensors.backward, tensors.scale, tensors.side)
    lse = tensors.lse if specialization.lse else None
    arguments = ForwardTensors(tensors.q, tensors.k, tensors.v, tensors.out, lse)
    launch = bind(kernel, target, arguments, tensors.side)
    return functools.partial(launch, arguments, tensors.scale, tensors.side)


def peer_runs(problem: Problem, tensors: Tensors) -> Iterator[tuple[str, Run]]:
    """Yields the baselines that compute this problem: SDPA's backends and unfused attention.

    None of them supports quantised inputs, varlen or a paged KV cache. For a backward problem only the
    backward pass is timed. SDPA's gradients need not be deterministic, even if the problem requires that.
    """
    forward = forward_of(problem)
    if forward.dtype.is_quantized or forward.features & OTHER_LAYOUTS:
        return
    inputs = differentiable(tensors) if problem.is_backward else tensors
    yield from sdpa_runs(forward, inputs)
    if has_room_for_scores(forward, inputs):
        timed = _timed(standard_run(forward, inputs), inputs)
        if timed is not None:
            yield "unfused", timed


def sdpa_runs(forward: Problem, tensors: Tensors) -> Iterator[tuple[str, Run]]:
    """Yields the SDPA backends that compute a forward problem, or its gradients if `tensors` has them."""
    for name, backend in BACKENDS.items():
        run = sdpa_run(forward, tensors, backend)
        timed = None if run is None else _timed(run, tensors)
        if timed is not None:
            yield name, timed


def _timed(forward: Run, tensors: Tensors) -> Run | None:
    """Returns the run to time, forward or backward; None if the implementation raises an error."""
    if tensors.backward is None:
        return forward if _works(forward) else None
    with torch.enable_grad():
        if not _works(forward):
            return None
    backward = gradient_run(forward, tensors)
    return backward if _works(backward) else None


def standard_run(problem: Problem, tensors: Tensors) -> Run:
    """Returns a run of unfused attention on these tensors."""
    inputs = (tensors.q, tensors.k, tensors.v)
    return functools.partial(unfused_attention, problem, *inputs, tensors.side, scale=tensors.scale)


def has_room_for_scores(forward: Problem, tensors: Tensors) -> bool:
    """Returns whether the scores of unfused attention, with gradients if it records them, fit the GPU."""
    free, _ = torch.cuda.mem_get_info(tensors.q.device)
    copies = GRADIENT_SCORE_COPIES if tensors.q.requires_grad else SCORE_COPIES
    return copies * score_bytes(forward) < MEMORY_SHARE * free


def _works(run: Run) -> bool:
    """Returns whether an implementation supports these tensors. SDPA's backends raise if they do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def run_finals(
    problem: Problem,
    candidates: tuple[Candidate, ...],
    specialization: Specialization,
    target: Target,
    device: torch.device,
    rounds: int = ROUNDS,
    closest_seconds: float = CLOSEST_SECONDS,
) -> tuple[Measurement, ...]:
    """Times candidates and baselines interleaved on the same inputs, and the fastest candidates again.

    If SDPA computes the problem with a mask, ties of the fastest candidate and SDPA's backends are also
    timed with shared masks.

    Returns:
        A measurement for each candidate, with the times of all baselines from the same run.
    """
    with torch.cuda.device(device), precision_of(problem.dtype):
        tensors = make_tensors(problem, device, lse=specialization.lse)
        runs = [kernel_run(problem, candidate, specialization, target, tensors) for candidate in candidates]
        measured, peers = _with_peers(runs, list(peer_runs(problem, tensors)), device, rounds)
        closest = _time_closest(runs, measured, device, rounds, closest_seconds)
        own = on_gpu(closest, device)
        results = [msgspec.structs.replace(measurement, peers=peers) for measurement in own]
        if results and timed_ways(problem):
            fastest = min(own, key=lambda measurement: measurement.ms)
            # Any tie of the fastest candidate may be selected.
            level = [number for number, measurement in enumerate(own) if is_tied(measurement, fastest)]
            best = [candidates[number] for number in level]
            times = _shared_times(problem, best, specialization, target, tensors, rounds)
            for number, shared in zip(level, times, strict=True):
                results[number] = msgspec.structs.replace(results[number], shared=shared)
    return tuple(results)


def _shared_times(
    problem: Problem,
    candidates: Sequence[Candidate],
    specialization: Specialization,
    target: Target,
    tensors: Tensors,
    rounds: int,
) -> list[tuple[SharedTime, ...]]:
    """Times candidates and SDPA's backends interleaved with shared masks, one run for each way of sharing.

    Returns:
        The times of each candidate.
    """
    bias, device = tensors.side.bias, tensors.q.device
    assert bias is not None
    by_way = []
    for way in timed_ways(problem):
        side = tensors.side._replace(bias=narrowed(bias, way).expand_as(bias))
        masked = msgspec.structs.replace(tensors, side=side)
        runs = [kernel_run(problem, candidate, specialization, target, masked) for candidate in candidates]
        measured, peers = _with_peers(runs, list(sdpa_runs(problem, masked)), device, rounds)
        by_way.append([SharedTime(way, measurement.ms, peers) for measurement in measured])
    return list(zip(*by_way, strict=True))


def _with_peers(
    runs: Sequence[Run], peers: Sequence[tuple[str, Run]], device: torch.device, rounds: int
) -> tuple[tuple[Measurement, ...], tuple[PeerTime, ...]]:
    """Times kernels and baselines interleaved, in one run."""
    measured = measure_interleaved([*runs, *(run for _, run in peers)], device, rounds=rounds)
    times = zip(peers, measured[len(runs) :], strict=True)
    return measured[: len(runs)], tuple(PeerTime(name, measurement.ms) for (name, _), measurement in times)


def _time_closest(
    runs: Sequence[Run], measured: Sequence[Measurement], device: torch.device, rounds: int, seconds: float
) -> tuple[Measurement, ...]:
    """Times the fastest candidates with more samples, and scales their times to the clock of `measured`.

    They are interleaved, or, if the power limit matters, timed alone.
    """
    fastest = min((measurement.ms for measurement in measured), default=0.0)
    close = [number for number, measurement in enumerate(measured) if measurement.ms <= CLOSE * fastest]
    is_limited = fastest >= LONG_MS or any(measurement.throttled for measurement in measured)
    if is_limited and fastest <= SUSTAINED_MS:
        return _time_alone(runs, measured, close, device, seconds)
    before = sum(measured[number].ms for number in close)
    more = min(MORE_ROUNDS * rounds, int(min(MORE_MS, 1e3 * seconds) / before)) if before else 0
    if len(close) < 2 or more <= rounds:
        return tuple(measured)
    again = measure_interleaved([runs[number] for number in close], device, rounds=more)
    return _replaced(measured, close, again, before / sum(measurement.ms for measurement in again))


def _time_alone(
    runs: Sequence[Run],
    measured: Sequence[Measurement],
    close: Sequence[int],
    device: torch.device,
    limit: float,
) -> tuple[Measurement, ...]:
    """Times candidates under sustained load, and scales their times to the clock of `measured`.

    The fastest of them keeps its time in `measured`, because baselines were timed in that run.
    """
    if len(close) < 2:
        return tuple(measured)
    seconds = min(SUSTAINED_SECONDS, limit / (2 * len(close)))
    again = measure_sustained([runs[number] for number in close], device, seconds=seconds)
    number, best = min(zip(close, again, strict=True), key=lambda pair: pair[1].ms)
    return _replaced(measured, close, again, measured[number].ms / best.ms)


def _replaced(
    measured: Sequence[Measurement], numbers: Sequence[int], again: Sequence[Measurement], clock: float
) -> tuple[Measurement, ...]:
    """Returns measurements with those of `numbers` replaced, their times multiplied by `clock`."""
    replaced = list(measured)
    for number, measurement in zip(numbers, again, strict=True):
        throttled = measurement.throttled or measured[number].throttled
        replaced[number] = msgspec.structs.replace(
            measurement,
            ms=measurement.ms * clock,
            p20=measurement.p20 * clock,
            p80=measurement.p80 * clock,
            throttled=throttled,
        )
    return tuple(replaced)
