"""flash-attn-4 on contiguous inputs of its own layout, [batch, seqlen, heads, head_dim]."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import Tensor

from flashtune.core.problem import Feature, Problem
from flashtune.tuner.execution.inputs import Tensors

FLASH_ATTN_4 = "flash-attn-4"
COMPUTED = frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.VARLEN})


def flash_attn_4_version() -> str:
    """Returns the installed flash-attn-4's version, empty if it is not installed."""
    try:
        return metadata.version(FLASH_ATTN_4)
    except metadata.PackageNotFoundError:
        return ""


def flash_attn_4_call(problem: Problem, tensors: Tensors) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """Returns a call as in a program, and a run whose output has heads before tokens."""
    module: Any = importlib.import_module("flash_attn.cute")
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (tensors.q, tensors.k, tensors.v))
    options: dict[str, Any] = {"softmax_scale": tensors.scale, "causal": problem.is_causal}
    side = tensors.side
    if problem.window_left is not None or problem.window_right is not None:
        right = 0 if problem.is_causal else problem.window_right
        options |= {"causal": False, "window_size": (problem.window_left, right)}
    if side.softcap is not None:
        options["softcap"] = side.softcap
    if side.sinks is not None:
        options["learnable_sink"] = side.sinks
    if problem.total_q:
        call = functools.partial(
            module.flash_attn_varlen_func,
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=side.cu_seqlens_q,
            cu_seqlens_k=side.cu_seqlens_kv,
            max_seqlen_q=problem.seqlen_q,
            max_seqlen_k=problem.seqlen_kv,
            **options,
        )
    else:
        call = functools.partial(module.flash_attn_func, q, k, v, **options)

    def run() -> Tensor:
        result = call()
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return (out[None] if problem.total_q else out).transpose(1, 2)

    return call, run
