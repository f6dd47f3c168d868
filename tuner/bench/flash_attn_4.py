"""flash-attn-4 on contiguous inputs of its own layout, [batch, seqlen, heads, head_dim]."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problem import Feature, Problem
from flashtune.tuner.execution.inputs import Tensors

FLASH_ATTN_4 = "flash-attn-4"
COMPUTED = frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS, Feature.PACKED})


def flash_attn_4_call(problem: Problem, tensors: Tensors) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """Returns a call as in a program, and a run whose output has heads before tokens."""
    call = _call(problem, tensors, *(_own(problem, tensor) for tensor in (tensors.q, tensors.k, tensors.v)))
    return call, lambda: _heads_first(problem, _output(call()))


def flash_attn_4_gradients(problem: Problem, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    """Runs a forward pass, and returns a run of its backward pass alone.

    The run returns the gradients of q, k and v with heads before tokens.
    """
    assert tensors.backward is not None
    inputs = tensors.q, tensors.k, tensors.v
    leaves = [_own(problem, tensor).detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        out = _output(_call(problem, tensors, *leaves)())
    dout = _own(problem, tensors.backward.dout)

    def run() -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(_heads_first(problem, gradient) for gradient in gradients)

    return run


def _call(problem: Problem, tensors: Tensors, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    module: Any = importlib.import_module("flash_attn.cute")
    options: dict[str, Any] = {"softmax_scale": tensors.scale, "causal": problem.is_causal}
    side = tensors.side
    if problem.window_left is not None or problem.window_right is not None:
        right = 0 if problem.is_causal else problem.window_right
        options |= {"causal": False, "window_size": (problem.window_left, right)}
    if side.softcap is not None:
        options["softcap"] = side.softcap
    if side.sinks is not None:
        options["learnable_sink"] = side.sinks
    if not problem.packed:
        return functools.partial(module.flash_attn_func, q, k, v, **options)
    return functools.partial(
        module.flash_attn_varlen_func,
        q,
        k,
        v,
        cu_seqlens_q=side.cu_seqlens_q,
        cu_seqlens_k=side.cu_seqlens_kv,
        max_seqlen_q=problem.seqlen_q,
        max_seqlen_k=problem.seqlen_kv,
        **options,
    )


def _output(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _own(problem: Problem, tensor: Tensor) -> Tensor:
    """Returns a contiguous copy with tokens before heads, [tokens, heads, width] of packed sequences."""
    swapped = tensor.transpose(1, 2).contiguous()
    return swapped[0] if problem.packed else swapped


def _heads_first(problem: Problem, tensor: Tensor) -> Tensor:
    return (tensor[None] if problem.packed else tensor).transpose(1, 2)
