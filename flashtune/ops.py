"""The torch operators `flashtune::attention` and `flashtune::attention_with_lse`.

Compilers and dispatch modes see one opaque node of known shapes. Eager calls go past them, since an
operator costs as much host time as the rest of a call. A program that loads a saved graph with
these operators imports this module first.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashtune.backward_ops import differentiated
from flashtune.calls import serve
from flashtune.modes import refuse_tangents
from flashtune.operators import TAGS, contiguous, library
from flashtune.options import Call, Options
from flashtune.quantization import given_scales, negated
from flashtune.request import read_request, requires_grad
from flashtune.serving import Result
from flashtune.side import NO_SIDE, Side

ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, str causal, float? scale, str layout, str prefer, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool deterministic=False)"
)


def call_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: Side = NO_SIDE,
    deterministic: bool = False,
) -> Result:
    """The operator of a call; torch.compile traces through this into one node."""
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    op = torch.ops.flashtune.attention_with_lse if return_lse else torch.ops.flashtune.attention
    result: Result = op(q, k, v, causal, scale, layout, prefer, *scales.scales, deterministic)
    return result


def _register(name: str, returns: str, return_lse: bool) -> None:
    """One operator: what it computes, its shapes, and how autograd goes through it."""

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        served = serve(q, k, v, causal, scale, layout, return_lse, prefer, scales, deterministic)
        return contiguous(served)

    def shapes(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        del scale, deterministic
        request = read_request(q, k, v, causal, layout, return_lse, prefer, scales=scales)
        out = q.new_empty(request.out_shape, dtype=request.out_dtype)
        return (out, q.new_empty(request.lse_shape, dtype=request.lse_dtype)) if return_lse else out

    def differentiate(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        refuse_tangents(q, k, v, *scales.scales)
        if requires_grad(q, k, v, scales):
            if scale is not None and scale < 0.0:
                q, scale = negated(q), -scale
            request = read_request(q, k, v, causal, layout, return_lse, prefer, scales, deterministic, True)
            options = Options(causal, layout, layout, return_lse, prefer)
            return contiguous(differentiated(request, Call(q, k, v, scale, options, scales), _forward))
        with torch._C._AutoDispatchBelowAutograd():
            return call_op(q, k, v, causal, scale, layout, return_lse, prefer, scales, deterministic)

    library.define(f"{name}{ARGUMENTS} -> {returns}", tags=TAGS)
    library.impl(name, compute, "CompositeExplicitAutograd")
    library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"flashtune::{name}", shapes, lib=library)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the operator."""
    causal, layout, *_ = call.options
    result = call_op(call.q, call.k, call.v, causal, call.scale, layout, True, call.options.prefer)
    return cast("tuple[Tensor, Tensor]", result)


_register("attention", "Tensor", return_lse=False)
_register("attention_with_lse", "(Tensor, Tensor)", return_lse=True)
