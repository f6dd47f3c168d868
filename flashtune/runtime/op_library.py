"""What the torch operators of this package share: their library, and a call as a list of operands."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from flashtune.core.extra_inputs import ExtraInputs
from flashtune.request.options import Call, Options
from flashtune.request.request import Result

# Inductor must hand over the strides that the program has: kernels are chosen by them.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

library = Library("flashtune", "DEF")

# A call of any kind, as `operands` lists it.
CALL_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor? v, float? scale, str causal, str layout, str kv_layout, bool return_lse, "
    "str prefer, SymInt? window_left, SymInt? window_right, SymInt sink_tokens, SymInt chunk, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt latent, bool deterministic, Tensor? q_scale, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? slopes, Tensor? bias, Tensor? sinks, Tensor? prefix, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqlens_kv, Tensor? block_table, "
    "Tensor? seed, float? softcap, float? dropout"
)


def operands(call: Call) -> tuple[object, ...]:
    """A call as an operator takes it."""
    options = call.options
    causal = options.causal
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    # An operator returns nothing that it was given, nor takes one tensor for two.
    values = None if options.latent else call.v
    tensors = call.q, call.k, values, call.scale
    return (*tensors, causal, *options[1:5], *options.window, *options[6:], *call.side)


def call_of(
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
    """The call of an operator's operands."""
    window = window_left, window_right
    numbers = len(Options._fields) - 6
    options = Options(causal, layout, kv_layout, return_lse, prefer, window, *rest[:numbers])  # type: ignore[arg-type]
    return Call(q, k, k if v is None else v, scale, options, ExtraInputs(*rest[numbers:]))  # type: ignore[arg-type]


def contiguous(result: Result) -> Result:
    """SDPA's backends differ in the strides of what they return; a compiler was promised these."""
    if isinstance(result, Tensor):
        return result.contiguous()
    out, lse = result
    return out.contiguous(), lse.contiguous()
