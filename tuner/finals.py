"""The finals: the best candidates and the peers timed in turn, in one run; runs where the GPU is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtune.backward import bind_backward
from flashtune.costs import score_bytes
from flashtune.features import Bias, Feature
from flashtune.kernel import Specialization
from flashtune.launch import bind
from flashtune.masked_sdpa import is_masked, masked_attention
from flashtune.problem import Causal, Problem
from flashtune.proof.lengths import usual_lengths
from flashtune.proof.visible import places, visible_keys
from flashtune.record import Measurement, PeerTime
from flashtune.standard import standard_attention
from flashtune.standard_features import standard_features
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.gradients import differentiable, gradient_run
from flashtune.tuner.measurement import Run, measure_interleaved
from flashtune.tuner.passes import forward_of
from flashtune.tuner.tensors import Tensors, make_tensors

ROUNDS = 21
# Candidates so near the fastest run on among themselves, for so many times its rounds and at most so many
# milliseconds: medians of 21 rounds on a hot GPU are off by a percent.
CLOSE = 1.03
MORE_ROUNDS = 5
MORE_MS = 3000.0
BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The standard computation holds its scores two and a half times over; the rest is the mask and the like.
SCORE_COPIES = 3
# Of its gradients: weights in both types are kept, and the weights' and the scores' gradients join them.
GRADIENT_SCORE_COPIES = 6
MEMORY_SHARE = 0.5
MAX_MASK_ELEMENTS = 2**28
# How tensors lie, or are stored, that no peer takes.
LAID_OUT = frozenset({Feature.PACKED, Feature.PAGES, Feature.QUANTIZED_KV, Feature.LATENT})


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
    for name, backend in BACKENDS.items():
        run = sdpa_run(posed, given, backend)
        timed = None if run is None else _timed(run, given)
        if timed is not None:
            yield name, timed
    free, _ = torch.cuda.mem_get_info(tensors.q.device)
    copies = GRADIENT_SCORE_COPIES if problem.is_backward else SCORE_COPIES
    if copies * score_bytes(posed) < MEMORY_SHARE * free:
        timed = _timed(standard_run(posed, given), given)
        if timed is not None:
            yield "standard", timed


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


def sdpa_run(problem: Problem, tensors: Tensors, backend: SDPBackend) -> Run | None:
    """SDPA by one backend; None where its mask would be too large."""
    attend = sdpa_call(problem, tensors)
    if attend is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    return run


def sdpa_call(problem: Problem, tensors: Tensors) -> Callable[[], Tensor] | None:
    """SDPA by whichever backend is enabled when it is called; None where it cannot, or its mask is too large.

    SDPA's `is_causal` is aligned top-left, which is bottom-right too where lengths are equal. Whatever else
    hides keys, or is added to scores, is a mask. Each call adds a causal mask to a bias; others were made
    before. SDPA drops as many weights, drawn in its own way.
    """
    if problem.features & (LAID_OUT | {Feature.SOFTCAP, Feature.SINKS}):
        return None
    if is_masked(problem):
        # As dispatch would have it served: what it makes of the mask in each call counts.
        assert tensors.side.bias is not None
        inputs = (tensors.q, tensors.k, tensors.v, tensors.side.bias)
        return functools.partial(masked_attention, *inputs, tensors.scale, problem.causal)
    top_left = problem.causal is Causal.TOP_LEFT or problem.seqlen_q == problem.seqlen_kv
    causal = problem.causal is not Causal.NONE
    masked = bool(problem.features - {Feature.DROPOUT}) or (causal and not top_left)
    if masked and _mask_elements(problem) > MAX_MASK_ELEMENTS:
        return None
    return functools.partial(
        scaled_dot_product_attention,
        tensors.q,
        tensors.k,
        tensors.v,
        attn_mask=_mask(problem, tensors) if masked else None,
        dropout_p=tensors.side.dropout or 0.0,
        is_causal=causal and not masked,
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )


def _mask_elements(problem: Problem) -> int:
    """Elements of the mask that SDPA would be given."""
    heads = problem.heads if problem.features & {Feature.ALIBI, Feature.BIAS} else 1
    batch = problem.batch if problem.features - {Feature.WINDOW, Feature.CHUNK, Feature.FIRST_TOKENS} else 1
    return batch * heads * problem.seqlen_q * problem.seqlen_kv


def _mask(problem: Problem, tensors: Tensors) -> Tensor:
    """What is visible, or what is added to scores: [batch | 1, heads | 1, seqlen_q, seqlen_kv]."""
    device, side = tensors.q.device, tensors.side
    lengths, rows = usual_lengths(problem), torch.arange(problem.seqlen_q)
    batch = torch.arange(problem.batch)
    seen = visible_keys(problem, lengths, batch, rows, side, device)[:, None]
    if problem.bias is Bias.BOOLEAN:
        assert side.bias is not None
        seen = seen & side.bias
    if not problem.alibi and problem.bias is not Bias.ADDITIVE:
        return seen
    added = (
        torch.zeros((), device=device) if side.bias is None or side.bias.dtype is torch.bool else side.bias
    )
    if side.slopes is not None:
        place = places(problem, lengths, batch, rows, device)[:, None]
        distance = (place - torch.arange(problem.seqlen_kv, device=device)).abs()
        added = added - side.slopes[:, :, None, None] * distance
    return torch.where(seen, added, float("-inf")).to(tensors.q.dtype)


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

    Returns:
        A measurement for each candidate, with the times of all peers in it, as of one run.

    Raises:
        KernelError: A candidate does not compile or load.
        RuntimeError: A launch failed on the device.
    """
    with torch.cuda.device(device):
        tensors = make_tensors(problem, device, lse=specialization.lse)
        runs = [kernel_run(problem, candidate, specialization, target, tensors) for candidate in candidates]
        peers = list(peer_runs(problem, tensors))
        measured = measure_interleaved([*runs, *(run for _, run in peers)], device, rounds=rounds)
        own = _told_apart(runs, measured[: len(runs)], device, rounds)
    times = tuple(
        PeerTime(name, peer.ms) for (name, _), peer in zip(peers, measured[len(runs) :], strict=True)
    )
    return tuple(msgspec.structs.replace(one, peers=times) for one in own)


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
