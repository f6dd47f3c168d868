"""The library of this package's torch operators, and the conversion of a call to a list of operands."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from flashtune.core.extra_inputs import ExtraInputs
from flashtune.request.options import Call, Options
from flashtune.request.request import Result

# Inductor must preserve the program's strides, because kernels are selected by them.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

library = Library("flashtune", "DEF")

# Schema of a call of any kind, in the order of `operands`.
CALL_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor? v, float? scale, str causal, str layout, str kv_layout, bool return_lse, "
    "str prefer, SymInt? window_left, SymInt? window_right, SymInt sink_tokens, SymInt chunk, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt latent, bool deterministic, Tensor? q_scale, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? slopes, Tensor? bias, Tensor? sinks, Tensor? prefix, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqlens_kv, Tensor? block_table, "
    "Tensor? seed, float? softcap, float? dropout"
)


def operands(call: Call) -> tuple[object, ...]:
    """Returns the operands of an operator for a call."""
    options = call.options
    causal = options.causal
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    # An operator may neither return an input nor get the same tensor as two inputs.
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
    """Returns the call of an operator's operands."""
    window = window_left, window_right
    numbers = len(Options._fields) - 6
    options = Options(causal, layout, kv_layout, return_lse, prefer, window, *rest[:numbers])  # type: ignore[arg-type]
    return Call(q, k, k if v is None else v, scale, options, ExtraInputs(*rest[numbers:]))  # type: ignore[arg-type]


def contiguous(result: Result) -> Result:
    """Returns a contiguous result. SDPA's backends return various strides, but a compiler expects these."""
    if isinstance(result, Tensor):
        return result.contiguous()
    out, lse = result
    return out.contiguous(), lse.contiguous()
