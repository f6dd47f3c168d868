"""The torch operators `flashtune::attention` and `flashtune::attention_with_lse`.

Compilers and dispatch modes see one opaque node of known shapes. Eager calls go past them, since an
operator costs as much host time as the rest of a call. A program that loads a saved graph with
these operators imports this module first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from flashtune.calls import serve
from flashtune.quantization import given_scales, negated
from flashtune.request import read_request, requires_grad
from flashtune.serving import Result, prepare
from flashtune.side import NO_SIDE, Side

ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, str causal, float? scale, str layout, str prefer, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None)"
)

# Inductor must hand over the strides that the program has: kernels are chosen by them.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

library = Library("flashtune", "DEF")


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
) -> Result:
    """The operator of a call; torch.compile traces through this into one node."""
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    op = torch.ops.flashtune.attention_with_lse if return_lse else torch.ops.flashtune.attention
    result: Result = op(q, k, v, causal, scale, layout, prefer, *scales.scales)
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
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        return contiguous(serve(q, k, v, causal, scale, layout, return_lse, prefer, scales))

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
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        del scale
        request = read_request(q, k, v, causal, layout, return_lse, prefer, scales=scales)
        out = q.new_empty(request.out_shape, dtype=request.out_dtype)
        return (out, q.new_empty(request.lse_shape, dtype=torch.float32)) if return_lse else out

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
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        if requires_grad(q, k, v, scales):
            if scale is not None and scale < 0.0:
                q, scale = negated(q), -scale
            request = read_request(q, k, v, causal, layout, return_lse, prefer, True, scales)
            return contiguous(prepare(request, q, k, v)(q, k, v, scale))
        with torch._C._AutoDispatchBelowAutograd():
            return call_op(q, k, v, causal, scale, layout, return_lse, prefer, scales)

    library.define(f"{name}{ARGUMENTS} -> {returns}", tags=TAGS)
    library.impl(name, compute, "CompositeExplicitAutograd")
    library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"flashtune::{name}", shapes, lib=library)


def contiguous(result: Result) -> Result:
    """SDPA's backends differ in the strides of what they return; a compiler was promised these."""
    if isinstance(result, Tensor):
        return result.contiguous()
    out, lse = result
    return out.contiguous(), lse.contiguous()


_register("attention", "Tensor", return_lse=False)
_register("attention_with_lse", "(Tensor, Tensor)", return_lse=True)
