"""What a problem asks for beside shapes, as templates see it, and the arguments that this adds."""

from __future__ import annotations

import msgspec

from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Bias, KvDtype, KvScale, Problem
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors

# Longer windows and chunks hide nothing, and sums of two such are integers of 32 bits.
FARTHEST = 2**30 - 1
# What stands for no bound.
UNBOUNDED = -1
COUNT = 5
# The first of NVIDIA's architectures that converts 8-bit floats of 4 exponent bits.
CONVERTS_E4M3 = 89
STORED_TYPES = {KvDtype.E4M3: "*fp8e4nv", KvDtype.INT8: "*i8"}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is compiled in of a problem's features; `common/masks.jinja` renders from it.

    Attributes:
        window_left: Keys that a query sees before its place, or -1.
        window_right: Likewise behind it.
        first_tokens: Keys at the start that window and chunk do not hide.
        chunk: Keys of a chunk, or 0.
        prefix: Whether each sequence has a prefix that all its queries see.
        softcap: Whether scores are capped.
        alibi: Whether distance is taken off the scores.
        bias: What is laid over the scores.
        sinks: Whether each head has a score without a value.
        packed: Whether sequences lie one behind the other.
        lengths: Whether `seqlens_kv` says how many keys a sequence has; in pages it always does.
        page_size: Keys of a page, or 0.
        quantized: Whether keys and values are stored in 8 bits.
        page_scales: Whether each head's part of a page has scales of its own there.
        dropout: Whether weights are dropped.
    """

    window_left: int
    window_right: int
    first_tokens: int
    chunk: int
    prefix: bool
    softcap: bool
    alibi: bool
    bias: Bias
    sinks: bool
    packed: bool
    lengths: bool
    page_size: int
    quantized: bool
    page_scales: bool
    dropout: bool


def asked_of(problem: Problem) -> Asked:
    """What a template must know of a problem's features."""
    return Asked(
        window_left=_bound(problem.window_left),
        window_right=_bound(problem.window_right),
        first_tokens=min(problem.first_tokens, FARTHEST),
        chunk=min(problem.chunk, FARTHEST),
        prefix=problem.prefix,
        softcap=problem.softcap,
        alibi=problem.alibi,
        bias=problem.bias,
        sinks=problem.sinks,
        packed=problem.packed > 0,
        lengths=problem.lengths or problem.page_size > 0,
        page_size=problem.page_size,
        quantized=problem.kv_dtype is not None,
        page_scales=problem.kv_dtype is not None and problem.kv_scale is KvScale.PAGE,
        dropout=problem.dropout,
    )


def asked_arguments(
    problem: Problem, specialization: Specialization, workspaces: tuple[str, ...]
) -> tuple[Argument, ...]:
    """The arguments of `forward_arguments`, and what the problem's features add.

    q, k, v, out, lse, side tensors, workspaces, scale, numbers, twelve strides, those of side tensors, five
    counts, and of packed sequences how many there are.
    """
    plain = forward_arguments(problem.dtype, specialization, workspaces)
    tensors, rest = plain[:5], plain[5:]
    if problem.kv_dtype is not None:
        stored = STORED_TYPES[problem.kv_dtype]
        tensors = tuple(
            msgspec.structs.replace(one, type=stored) if one.name in ("k", "v") else one for one in tensors
        )
    split = len(workspaces) + 1
    return (
        *tensors,
        *side_tensors(problem),
        *rest[:split],
        *side_numbers(problem),
        *rest[split:-COUNT],
        *side_strides(problem, specialization),
        *rest[-COUNT:],
        *((Argument("sequences", "i32"),) if problem.packed else ()),
    )


def _bound(keys: int | None) -> int:
    return UNBOUNDED if keys is None else min(keys, FARTHEST)
