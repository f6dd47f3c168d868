"""The finals: the best candidates and the peers timed in turn, in one run; runs where the GPU is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtune.dtypes import TORCH_DTYPES
from flashtune.kernel import Specialization
from flashtune.launch import bind
from flashtune.problem import Causal, Problem
from flashtune.quantization import quantize
from flashtune.record import Measurement, PeerTime
from flashtune.side import NO_SIDE, Side
from flashtune.standard import score_bytes, standard_attention
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.measurement import Run, measure_interleaved

ROUNDS = 21
BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The standard computation holds its scores two and a half times over; the rest is the mask and the like.
SCORE_COPIES = 3
MEMORY_SHARE = 0.5
MAX_MASK_ELEMENTS = 2**28


class Tensors(msgspec.Struct, frozen=True):
    """Random inputs of a problem and room for its output, contiguous [batch, heads, seqlen, head_dim].

    `scales` are those of quantised inputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scales: Side = NO_SIDE

    @property
    def scale(self) -> float:
        """The usual softmax scale."""
        return float(self.q.shape[-1] ** -0.5)


def make_tensors(problem: Problem, device: torch.device) -> Tensors:
    """Fresh random inputs, quantised with their own scales where the problem has such."""
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    keys = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    shapes = ((*rows, problem.head_dim), (*keys, problem.head_dim), (*keys, problem.value_head_dim))
    out = torch.empty(*rows, problem.value_head_dim, dtype=TORCH_DTYPES[problem.out_dtype], device=device)
    if problem.dtype.is_quantized:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
        (q, q_scale), (k, k_scale), (v, v_scale) = (quantize(make(shape)) for shape in shapes)
        return Tensors(q, k, v, out, Side(q_scale, k_scale, v_scale))
    make = functools.partial(torch.randn, dtype=TORCH_DTYPES[problem.dtype], device=device)
    q, k, v = map(make, shapes)
    return Tensors(q, k, v, out)


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
    launch = bind(kernel, target, tensors.q, tensors.k, tensors.v, tensors.out)
    inputs = (tensors.q, tensors.k, tensors.v, tensors.out, None, tensors.scale, tensors.scales)
    return functools.partial(launch, *inputs)


def peer_runs(problem: Problem, tensors: Tensors) -> Iterator[tuple[str, Run]]:
    """The other implementations that compute this problem here: SDPA's backends, the standard one.

    None of them takes quantised inputs.
    """
    if problem.dtype.is_quantized:
        return
    for name, backend in BACKENDS.items():
        run = sdpa_run(problem, tensors, backend)
        if run is not None and _works(run):
            yield name, run
    free, _ = torch.cuda.mem_get_info(tensors.q.device)
    if SCORE_COPIES * score_bytes(problem) < MEMORY_SHARE * free:
        run = functools.partial(
            standard_attention, tensors.q, tensors.k, tensors.v, scale=tensors.scale, causal=problem.causal
        )
        if _works(run):
            yield "standard", run


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
    """SDPA by whichever backend is enabled when it is called; None where its mask would be too large.

    SDPA's `is_causal` is aligned top-left, which is bottom-right too where lengths are equal.
    """
    top_left = problem.causal is Causal.TOP_LEFT or problem.seqlen_q == problem.seqlen_kv
    causal = problem.causal is not Causal.NONE
    mask = None
    if causal and not top_left:
        if problem.seqlen_q * problem.seqlen_kv > MAX_MASK_ELEMENTS:
            return None
        ones = torch.ones(problem.seqlen_q, problem.seqlen_kv, dtype=torch.bool, device=tensors.q.device)
        mask = ones.tril_(problem.diagonal)
    return functools.partial(
        scaled_dot_product_attention,
        tensors.q,
        tensors.k,
        tensors.v,
        attn_mask=mask,
        is_causal=causal and top_left,
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )


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
    """Times candidates and peers in turn on the same inputs.

    Returns:
        A measurement for each candidate, with the times of all peers in it.

    Raises:
        KernelError: A candidate does not compile or load.
        RuntimeError: A launch failed on the device.
    """
    with torch.cuda.device(device):
        tensors = make_tensors(problem, device)
        runs = [kernel_run(problem, candidate, specialization, target, tensors) for candidate in candidates]
        peers = list(peer_runs(problem, tensors))
        measured = measure_interleaved([*runs, *(run for _, run in peers)], device, rounds=rounds)
    times = tuple(
        PeerTime(name, peer.ms) for (name, _), peer in zip(peers, measured[len(runs) :], strict=True)
    )
    return tuple(msgspec.structs.replace(own, peers=times) for own in measured[: len(runs)])
