"""Attention of a whole model over sequence length: memory, HBM traffic and roofline times."""

import math

import msgspec
import torch

from flashtune.core.features.records import NUMBERS
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Dtype, Problem, score_bytes
from flashtune.core.target import Target
from flashtune.launch.compilation import load_module
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.templates.rendering import render
from flashtune.tuner.analysis.explain import roofline
from flashtune.tuner.execution.inputs import make_inputs
from flashtune.tuner.tables.kernel_choice import Chosen, choose
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import LayerCall, ModelAttention, backward_of, model_calls

# `unfused_attention` stores scores, probabilities, and half as much in 16 bits at once.
SCORE_COPIES = 2.5
# Its backward pass stores probabilities and their gradients in both types, and gradients of the scores.
GRADIENT_SCORE_COPIES = 4
LSE_BYTES = 4

FLOAT32_BYTES = 4


class Way(msgspec.Struct, frozen=True):
    """One implementation of a model's attention at one length."""

    # Bytes of one layer in addition to queries, keys and values: its output and scratch. In training, also
    # further tensors of the backward pass. Of the kind of layer that needs most.
    memory: int
    # HBM bytes of all layers with the loop order of the implementation. Repeated reads count if they miss L2.
    traffic: int
    # Minimum time of all layers on the target, in ms, from its peak rates and the unavoidable bytes. These
    # are each input and output once, and for unfused attention its intermediate results.
    bound_ms: float
    # `matrix units`, `softmax` or `memory`, for the kind of layer that takes longest.
    bound_by: str


class Point(msgspec.Struct, frozen=True):
    """A model's attention at one length."""

    seqlen: int  # Tokens of a sequence.
    # Bytes of the caches of all layers and sequences without gaps: keys and values once for each KV head, or
    # latent keys.
    kv_bytes: int
    unfused: Way  # Unfused attention, which stores its scores.
    flash: Way  # The kernels that dispatch would select.
    families: tuple[str, ...]  # Those kernels' families without duplicates.
    speedup: float  # Time of unfused attention over that of the kernels, by their rooflines.


class Overview(msgspec.Struct, frozen=True):
    """A model's attention in one phase on one target, over sequence length."""

    model: str
    phase: Phase
    target: str
    layers: int
    batch: int
    dtype: Dtype
    points: tuple[Point, ...]


def overviews(
    attention: ModelAttention, sizes: ModelSizes, target: Target, db: str | None
) -> tuple[Overview, ...]:
    """Returns a model's attention, one overview for each batch size and type."""
    groups: dict[tuple[int, Dtype], list[Point]] = {}
    for calls in model_calls(attention, sizes):
        problem = calls[0].problem
        points = groups.setdefault((problem.batch, problem.dtype), [])
        gradients = (LayerCall(backward_of(call.problem), call.layers) for call in calls)
        both = (*calls, *gradients) if sizes.phase is Phase.TRAINING else calls
        points.append(_point(attention, both, target, db))
    return tuple(
        Overview(
            attention.name,
            sizes.phase,
            target.name,
            attention.layers,
            batch,
            dtype,
            tuple(sorted(points, key=lambda point: point.seqlen)),
        )
        for (batch, dtype), points in groups.items()
    )


def _point(attention: ModelAttention, calls: tuple[LayerCall, ...], target: Target, db: str | None) -> Point:
    chosen = [choose(call.problem, target, db) for call in calls]
    flash = _together([flash_way(kernel, call, target) for kernel, call in zip(chosen, calls, strict=True)])
    standard = _together([standard_way(call, target) for call in calls])
    problem = calls[0].problem
    return Point(
        seqlen=problem.seqlen_kv,
        kv_bytes=attention.cache_bytes(problem),
        unfused=standard,
        flash=flash,
        families=tuple(dict.fromkeys(kernel.family.name for kernel in chosen)),
        speedup=standard.bound_ms / flash.bound_ms,
    )


def _together(ways: list[Way]) -> Way:
    """Combines all kinds of layers, and both passes of training, run in sequence."""
    longest = max(ways, key=lambda way: way.bound_ms)
    return Way(
        max(way.memory for way in ways),
        sum(way.traffic for way in ways),
        sum(way.bound_ms for way in ways),
        longest.bound_by,
    )


def out_bytes(problem: Problem) -> int:
    """Returns the bytes of the output."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    return rows * problem.value_head_dim * problem.out_dtype.itemsize


def _gradient_bytes(problem: Problem) -> int:
    """Returns the bytes of the gradients of the output, of queries, keys and values."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    both = problem.head_dim + problem.value_head_dim
    return (rows + keys) * both * problem.dtype.itemsize


def flash_way(chosen: Chosen, call: LayerCall, target: Target) -> Way:
    """Returns the kernel that dispatch would select."""
    problem, layers = call
    moved = sum(item.bytes for item in chosen.family.hbm_items(problem, chosen.config, target))
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    # 8-bit values are transposed into a buffer of their own size.
    scratch = keys * problem.value_head_dim if problem.dtype.is_quantized else 0
    memory = out_bytes(problem) + rows * LSE_BYTES + scratch
    if problem.is_backward:
        kernel = render(chosen.family, problem, chosen.config, chosen.specialization)
        memory += _gradient_bytes(problem) + workspace_bytes(kernel, problem)
    return _way(problem, memory, moved, problem.minimal_bytes(), layers, target)


def unfused_problems(problem: Problem) -> tuple[Problem, Problem]:
    """Returns the problem of unfused attention, with quantised inputs as 16 bits, and its problem unmasked.

    Unfused attention computes masked pairs too.
    """
    dtype = Dtype.BF16 if problem.dtype.is_quantized else problem.dtype
    plain = msgspec.structs.replace(problem, dtype=dtype)
    full = msgspec.structs.replace(
        plain, causal=Causal.NONE, window_left=None, window_right=None, sink_tokens=0, chunk=0
    )
    return plain, full


def standard_way(call: LayerCall, target: Target) -> Way:
    """Returns unfused attention."""
    problem, layers = call
    plain, full = unfused_problems(problem)
    traffic = sum(item.bytes for item in standard_hbm_items(plain))
    copies = GRADIENT_SCORE_COPIES if problem.is_backward else SCORE_COPIES
    memory = out_bytes(problem) + int(copies * score_bytes(plain))
    memory += _gradient_bytes(problem) if problem.is_backward else 0
    return _way(full, memory, traffic, traffic, layers, target)


def _way(problem: Problem, memory: int, traffic: int, least_traffic: int, layers: int, target: Target) -> Way:
    least = roofline(problem, target)
    times = {
        "matrix units": layers * least.matrix_ms,
        "softmax": layers * least.softmax_ms,
        "memory": layers * least_traffic / (target.hbm_bandwidth * 1e6),
    }
    bound_by = max(times, key=lambda name: times[name])
    return Way(memory, layers * traffic, times[bound_by], bound_by)


def workspace_bytes(kernel: Kernel, problem: Problem) -> int:
    """Returns the bytes of a backward kernel's workspaces, for contiguous tensors of a problem."""
    inputs = make_inputs(problem, torch.device("meta"))
    q, k, v, out, side = inputs.q, inputs.k, inputs.v, inputs.out, inputs.side
    extra = (getattr(side, name) for name in kernel.all_side if name not in NUMBERS)
    workspaces: tuple[tuple[int, ...], ...]
    _, workspaces, _ = load_module(kernel).launch_plan(q, k, v, out, out, q, k, v, *extra)
    return FLOAT32_BYTES * sum(math.prod(shape) for shape in workspaces)
