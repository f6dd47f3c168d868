"""The finals: the best candidates and the peers timed in turn, in one run; runs where the GPU is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence

import msgspec
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import narrowed
from flashtune.core.problem import Problem, score_bytes
from flashtune.core.record import Measurement, PeerTime, SharedTime
from flashtune.core.target import Target
from flashtune.dispatch.masked_sdpa import timed_ways
from flashtune.launch.backward import bind_backward
from flashtune.launch.forward import bind
from flashtune.runtime.unfused import standard_attention, standard_features
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.inputs import Tensors, differentiable, gradient_run, make_tensors
from flashtune.tuner.execution.noise import is_level
from flashtune.tuner.execution.sdpa import BACKENDS, LAID_OUT, sdpa_run
from flashtune.tuner.execution.timing import Run, measure_interleaved
from flashtune.tuner.workloads.passes import forward_of

ROUNDS = 21
# Candidates so near the fastest run on among themselves, for so many times its rounds and at most so many
# milliseconds: medians of 21 rounds on a hot GPU are off by a percent.
CLOSE = 1.03
MORE_ROUNDS = 5
MORE_MS = 3000.0
# The standard computation holds its scores two and a half times over; the rest is the mask and the like.
SCORE_COPIES = 3
# Of its gradients: weights in both types are kept, and the weights' and the scores' gradients join them.
GRADIENT_SCORE_COPIES = 6
MEMORY_SHARE = 0.5


def kernel_run(
    problem: Problem,
    candidate: Candidate,
    specialization: Specialization,
    target: Target,
    tensors: Tensors,
) -> Run:
    """A candidate's launch on these tensors.

    Raises:
        KernelError: It does not compile or load.
    """
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    if tensors.backward is not None:
        backward = bind_backward(kernel, target, tensors.backward, tensors.side)
        return functools.partial(backward, tensors.backward, tensors.scale, tensors.side)
    given = (tensors.q, tensors.k, tensors.v, tensors.out)
    launch = bind(kernel, target, *given, tensors.side)
    lse = tensors.lse if specialization.lse else None
    return functools.partial(launch, *given, lse, tensors.scale, tensors.side)


def peer_runs(problem: Problem, tensors: Tensors) -> Iterator[tuple[str, Run]]:
    """The other implementations that compute this problem here: SDPA's backends, the standard one.

    None of them takes quantised inputs, packed sequences or pages as they are. Of a backward problem their
    backward passes are timed alone, their forward passes having run before; SDPA's add up gradients in
    whatever order they do, wherever the problem asks for one order.
    """
    posed = forward_of(problem)
    if posed.dtype.is_quantized or posed.features & LAID_OUT:
        return
    given = differentiable(tensors) if problem.is_backward else tensors
    yield from sdpa_runs(posed, given)
    free, _ = torch.cuda.mem_get_info(tensors.q.device)
    copies = GRADIENT_SCORE_COPIES if problem.is_backward else SCORE_COPIES
    if copies * score_bytes(posed) < MEMORY_SHARE * free:
        timed = _timed(standard_run(posed, given), given)
        if timed is not None:
            yield "standard", timed


def sdpa_runs(posed: Problem, given: Tensors) -> Iterator[tuple[str, Run]]:
    """The backends of SDPA that compute a forward problem, or the gradients of tensors that have these."""
    for name, backend in BACKENDS.items():
        run = sdpa_run(posed, given, backend)
        timed = None if run is None else _timed(run, given)
        if timed is not None:
            yield name, timed


def _timed(forward: Run, tensors: Tensors) -> Run | None:
    """What is timed of an implementation: its forward pass, or the gradients; None where it refuses."""
    if tensors.backward is None:
        return forward if _works(forward) else None
    with torch.enable_grad():
        if not _works(forward):
            return None
    backward = gradient_run(forward, tensors)
    return backward if _works(backward) else None


def standard_run(problem: Problem, tensors: Tensors) -> Run:
    """The standard computation of these tensors."""
    given = (tensors.q, tensors.k, tensors.v)
    if problem.features:
        return functools.partial(standard_features, problem, *given, tensors.side, scale=tensors.scale)
    return functools.partial(standard_attention, *given, scale=tensors.scale, causal=problem.causal)


def _works(run: Run) -> bool:
    """Whether an implementation takes these tensors; SDPA's backends say no by raising."""
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
) -> tuple[Measurement, ...]:
    """Times candidates and peers in turn on the same inputs, and the fastest candidates once more.

    Of a problem that SDPA computes by a mask, the candidates that may be selected and SDPA's backends are
    also timed with shared masks.

    Returns:
        A measurement for each candidate, with the times of all peers in it, as of one run.

    Raises:
        KernelError: A candidate does not compile or load.
        RuntimeError: A launch failed on the device.
    """
    with torch.cuda.device(device):
        tensors = make_tensors(problem, device, lse=specialization.lse)
        runs = [kernel_run(problem, candidate, specialization, target, tensors) for candidate in candidates]
        measured, peers = _with_peers(runs, list(peer_runs(problem, tensors)), device, rounds)
        own = _told_apart(runs, measured, device, rounds)
        found = [msgspec.structs.replace(one, peers=peers) for one in own]
        if found and timed_ways(problem):
            fastest = min(own, key=lambda one: one.ms)
            # Any candidate whose time differs from the fastest by no more than noise may be selected.
            level = [number for number, one in enumerate(own) if is_level(one, fastest)]
            best = [candidates[number] for number in level]
            times = _shared_times(problem, best, specialization, target, tensors, rounds)
            for number, shared in zip(level, times, strict=True):
                found[number] = msgspec.structs.replace(found[number], shared=shared)
    return tuple(found)


def _shared_times(
    problem: Problem,
    candidates: Sequence[Candidate],
    specialization: Specialization,
    target: Target,
    tensors: Tensors,
    rounds: int,
) -> list[tuple[SharedTime, ...]]:
    """Times candidates and SDPA's backends in turn with shared masks, in one run for each way of sharing.

    Returns:
        The times of each candidate.
    """
    bias, device = tensors.side.bias, tensors.q.device
    assert bias is not None
    by_way = []
    for way in timed_ways(problem):
        side = tensors.side._replace(bias=narrowed(bias, way).expand_as(bias))
        given = msgspec.structs.replace(tensors, side=side)
        runs = [kernel_run(problem, candidate, specialization, target, given) for candidate in candidates]
        measured, peers = _with_peers(runs, list(sdpa_runs(problem, given)), device, rounds)
        by_way.append([SharedTime(way, one.ms, peers) for one in measured])
    return list(zip(*by_way, strict=True))


def _with_peers(
    runs: Sequence[Run], peers: Sequence[tuple[str, Run]], device: torch.device, rounds: int
) -> tuple[tuple[Measurement, ...], tuple[PeerTime, ...]]:
    """Times kernels and peers in turn, in one run."""
    measured = measure_interleaved([*runs, *(run for _, run in peers)], device, rounds=rounds)
    times = zip(peers, measured[len(runs) :], strict=True)
    return measured[: len(runs)], tuple(PeerTime(name, one.ms) for (name, _), one in times)


def _told_apart(
    runs: Sequence[Run], measured: Sequence[Measurement], device: torch.device, rounds: int
) -> tuple[Measurement, ...]:
    """What was measured, that of the closest by more samples: at the clock at which all were timed."""
    fastest = min((one.ms for one in measured), default=0.0)
    close = [number for number, one in enumerate(measured) if one.ms <= CLOSE * fastest]
    before = sum(measured[number].ms for number in close)
    more = min(MORE_ROUNDS * rounds, int(MORE_MS / before)) if before else 0
    if len(close) < 2 or more <= rounds:
        return tuple(measured)
    again = measure_interleaved([runs[number] for number in close], device, rounds=more)
    clock = before / sum(one.ms for one in again)
    found = list(measured)
    for number, one in zip(close, again, strict=True):
        throttled = one.throttled or measured[number].throttled
        found[number] = msgspec.structs.replace(
            one, ms=one.ms * clock, p20=one.p20 * clock, p80=one.p80 * clock, throttled=throttled
        )
    return tuple(found)
