"""The torch operator `flashtune::attention_features`: all calls that plain attention does not cover.

One operator for dense, packed and paged calls: compilers and dispatch modes see one opaque node of known
shapes. Eager calls go past it, as in `flashtune.ops`. Its second result is the log-sum-exp, or empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.feature_calls import serve_call, unsigned
from flashtune.feature_request import read_call
from flashtune.layouts import Layout
from flashtune.modes import runs_eagerly
from flashtune.ops import TAGS, contiguous, library
from flashtune.options import Call, Options
from flashtune.request import require_tensors, requires_grad
from flashtune.serving import Result, prepare
from flashtune.side import Side

NAME = "attention_features"
ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor? v, float? scale, str causal, str layout, str kv_layout, bool return_lse, "
    "str prefer, SymInt? window_left, SymInt? window_right, SymInt sink_tokens, SymInt chunk, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt latent, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? slopes, Tensor? bias, Tensor? sinks, Tensor? prefix, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_kv, Tensor? seqlens_kv, Tensor? block_table, float? softcap)"
)


def attend(call: Call) -> Result:
    """Attention of whatever a call holds: at once, or by the operator where torch wants to see one.

    Raises:
        ProblemError: The call is invalid, or nobody can serve it.
        KernelError: It is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: It is new, only generated kernels may serve and they are wrong here.
    """
    if runs_eagerly(call.q, call.k, call.v):
        return serve_call(call)
    require_tensors(call.q, call.k, call.v)
    options = call.options
    causal = options.causal
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    # An operator returns nothing that it was given, nor takes one tensor for two.
    values = None if options.latent else call.v
    out, lse = torch.ops.flashtune.attention_features(
        call.q,
        call.k,
        values,
        call.scale,
        causal,
        *options[1:5],
        *options.window,
        *options[6:],
        *call.side,
    )
    return (out, lse) if options.return_lse else out


def _call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    scale: float | None,
    causal: str,
    layout: str,
    kv_layout: str,
    return_lse: bool,
    prefer: str,
    window_left: int | None,
    window_right: int | None,
    *rest: object,
) -> Call:
    window = window_left, window_right
    options = Options(causal, layout, kv_layout, return_lse, prefer, window, *rest[:5])  # type: ignore[arg-type]
    return Call(q, k, k if v is None else v, scale, options, Side(*rest[5:]))  # type: ignore[arg-type]


def _both(result: Result, q: Tensor) -> tuple[Tensor, Tensor]:
    result = contiguous(result)
    return (result, q.new_empty(0, dtype=torch.float32)) if isinstance(result, Tensor) else result


def _compute(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _both(serve_call(_call_of(q, *rest)), q)  # type: ignore[arg-type]


def _shapes(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = _call_of(q, *rest)  # type: ignore[arg-type]
    width = call.options.latent or call.v.shape[-1]
    layout = Layout(call.options.layout)
    out = q.new_empty((*q.shape[:-1], width))
    if not call.options.return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    shape = tuple(q.shape[:-1])
    if layout in (Layout.BSHD, Layout.THD):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return out, q.new_empty(shape, dtype=torch.float32)


def _differentiate(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = _call_of(q, *rest)  # type: ignore[arg-type]
    if requires_grad(call.q, call.k, call.v, call.side):
        call = unsigned(call)
        served = prepare(read_call(call, True), call.q, call.k, call.v, call.side)
        return _both(served(call.q, call.k, call.v, call.scale, call.side), q)
    with torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, Tensor] = torch.ops.flashtune.attention_features(q, *rest)
        return found


library.define(f"{NAME}{ARGUMENTS} -> (Tensor, Tensor)", tags=TAGS)
library.impl(NAME, _compute, "CompositeExplicitAutograd")
library.impl(NAME, _differentiate, "Autograd")
torch.library.register_fake(f"flashtune::{NAME}", _shapes, lib=library)
