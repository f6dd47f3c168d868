"""Serves the attention of transformers' models by flashtune.

    import flashtune.integrations.transformers

    name = flashtune.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=name)

A call that flashtune does not compute, or not faster, goes to transformers' `sdpa` attention. Where `sdpa`
would ignore softcap or sinks, it goes to the `eager` attention of the model. Both also serve until kernels
are compiled on a worker thread. Compiled models compile their kernels at the first call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from flashtune.core.errors import UsageError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.session import SESSION, keep
from flashtune.dispatch.masked_sdpa import chosen_backend
from flashtune.integrations import transformers_masks as masks
from flashtune.integrations.host_library import host_attribute, host_library
from flashtune.integrations.transformers_masks import Structure
from flashtune.request.autocast import autocast, autocast_dtype
from flashtune.request.call import Call, Options
from flashtune.request.dropout import draw_seed
from flashtune.request.request import Executor
from flashtune.runtime import deferred
from flashtune.runtime.deferred import State
from flashtune.runtime.torch_modes import is_compiling, is_tracing, runs_eagerly
from flashtune.runtime.torch_ops import call_operator

__all__ = ["attention", "register"]

NEEDED = ("5.17", "6")
SDPA = "transformers.integrations.sdpa_attention"
# Devices on which flashtune serves. Tests replace it by the CPU, and `prepared` by a function that computes.
DEVICES = {"cuda"}
HALF = (torch.bfloat16, torch.float16)
# Padding is moved behind the tokens of each sequence if there are at least so many queries. Shorter sequences
# take longer to move than their masks to read.
MIN_MOVED = 256
TAKEN = ("eager", "sdpa", "flex_attention")
# Looks at a new kind of call: before its preparation, and after it.
STEPS = 2

# Transformers' attention functions, set by `register`.
_sdpa_attention: Callable[..., tuple[Tensor, None]] | None = None
_bias_mask: Callable[..., Tensor] | None = None
# Jobs that flashtune does not serve, so that their tensors are not made again.
_refused: dict[tuple[object, ...], bool] = SESSION.cache("refused by transformers")
# torch has no public function for this.
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Job(NamedTuple):
    """A call of flashtune for a layer.

    Attributes:
        call: The call. Its output is [batch, seqlen_q, heads, value_head_dim], or packed.
        usual: Name of the replaced operator in records, or None if it has no measurements.
        inverse: The places of tokens in the output, if padding was moved. None otherwise.
        short: The properties that distinguish jobs with tensors of their own. None for other jobs.
        is_apart: Whether the call has a bias and a causal mask, which could be merged.
    """

    call: Call
    usual: str | None
    inverse: tuple[Tensor, Tensor] | None = None
    short: tuple[object, ...] | None = None
    is_apart: bool = False


def register(name: str = "tuned_attention", *, dropout: bool = False) -> str:
    """Registers flashtune's attention and mask functions in transformers.

    Args:
        name: The name to register, which the result repeats.
        dropout: Whether to compute dropout too, which drops other weights than transformers does. These calls
            are always served. The first of a kind waits for its kernels, so that layers that are computed
            again drop the same weights.

    Returns:
        The name, for `attn_implementation` of a model.

    Raises:
        UsageError: The name cannot be used, or transformers is missing, too old or too new.
    """
    global _sdpa_attention, _bias_mask
    if "flash" in name:
        raise UsageError(
            f"name is {name!r}: transformers loads names with 'flash' from its Hub, pass another"
        )
    if not name or name in TAKEN or not name.isidentifier():
        raise UsageError(f"name is {name!r}: pass a new one of letters, digits and underscores")
    functions = host_attribute("transformers.modeling_utils", "AttentionInterface", *NEEDED)
    mask_functions = host_attribute(masks.MODULE, "AttentionMaskInterface", *NEEDED)
    masks.host = host_library(masks.MODULE, *NEEDED)
    _sdpa_attention, _bias_mask = (
        host_attribute(SDPA, each, *NEEDED)
        for each in ("sdpa_attention_forward", "create_position_bias_mask")
    )
    computed = functools.partial(attention, computes_dropout=True) if dropout else attention
    functions.register(name, computed)
    mask_functions.register(name, masks.attention_mask)
    return name


def attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    computes_dropout: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attention of one layer, [batch, seqlen_q, heads, value_head_dim], and None.

    The second result are the weights if the model's `eager` attention serves.

    Args:
        module: The layer's module, with `is_causal` if no argument states it.
        query: [batch, heads, seqlen_q, head_dim].
        key: [batch, kv_heads, seqlen_kv, head_dim].
        value: [batch, kv_heads, seqlen_kv, value_head_dim].
        attention_mask: A mask of `transformers_masks`, an additive mask, or None.
        dropout: The fraction of weights to drop.
        scaling: Factor of the scores; 1 / sqrt(head_dim) by default.
        softcap: Scores s become softcap · tanh(s / softcap).
        is_causal: Whether queries see no later keys, if there is no mask.
        s_aux: Logits of sinks [heads], in any type.
        position_bias: Bias that is added to the scores, [batch or 1, heads, seqlen_q, seqlen_kv].
        computes_dropout: Whether to compute calls with dropout. Otherwise transformers' attention serves.
        **others: Arguments for transformers' attention. Of these, `cu_seq_lens_q`, `cu_seq_lens_k`,
            `max_length_q` and `max_length_k` describe packed sequences. `indices` are the keys that each
            query sees, integers [batch, seqlen_q, keys].

    Raises:
        UsageError: The model selects blocks of keys, or has softcap or sinks and no `eager` attention.
    """
    indices = others.pop("indices", None)
    if others.get("block_indices") is not None or (indices is not None and attention_mask is None):
        raise UsageError(f"{type(module).__name__} selects blocks of keys: use another implementation")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and masks.is_spans(attention_mask):
        keys = attention_mask.shape[3]
        key, value = key[:, :, :keys], value[:, :, :keys]
        position_bias = None if position_bias is None else position_bias[..., :keys]
    if indices is not None and attention_mask is not None:
        attention_mask = masks.selected_mask(attention_mask, indices, query.shape[2], key.shape[2])
    # Compilers see the casts of the operators.
    dtype = None if is_compiling() else autocast_dtype(query.device)
    q, k, v, mask, bias = query, key, value, attention_mask, position_bias
    if dtype is not None:
        q, k, v = (autocast(one, dtype) for one in (q, k, v))
        mask, bias = (None if one is None else autocast(one, dtype) for one in (mask, bias))
    is_served = (
        query.device.type in DEVICES
        and (is_compiling() or (runs_eagerly(query, key, value) and not is_tracing()))
        and (not dropout or (computes_dropout and dropout < 1.0))
        and not others.get("output_attentions")
        and q.dtype is k.dtype is v.dtype
    )
    if is_served:
        given = q, k, v, mask, scaling, softcap, causal, s_aux, bias, others
        drops = (dropout, draw_seed(query.device)) if dropout else None
        job = _job(*given, drops)
        out = None if job is None else _served(job)
        if out is None and job is not None and (job.is_apart or job.short in _refused):
            # A bias has a second job, with the causal mask merged into it. It is prepared at the same time.
            job = _job(*given, drops, merges=job.is_apart)
            out = None if job is None else _served(job)
        if out is not None:
            return out.reshape(query.shape[0], query.shape[2], *out.shape[-2:]).contiguous(), None
    mask = None if attention_mask is None else masks.boolean_mask(attention_mask, query.shape[2])
    starts = _starts(query, attention_mask, key.shape[2], others)
    if starts is not None:
        packed = masks.packed_mask(*starts[:2], query.shape[2], key.shape[2], causal)
        mask = packed if mask is None else mask & packed
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if softcap is None and s_aux is None:
        assert _sdpa_attention is not None
        options |= {"is_causal": is_causal, "position_bias": position_bias}
        return _sdpa_attention(module, query, key, value, mask, **options, **others)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UsageError(
            f"{type(module).__name__} has softcap or sinks and no eager attention: use another implementation"
        )
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    found: tuple[Tensor, Tensor | None] = eager(
        module, query, key, value, mask, softcap=softcap, s_aux=s_aux, **options, **others
    )
    return found


def _served(job: Job) -> Tensor | None:
    """Returns the output of a call, or None if transformers' attention serves it."""
    call = job.call
    if is_compiling():
        out = call_operator(call)
    else:
        executor = prepared(job)
        if executor is None:
            return None
        out = executor(call.q, call.k, call.v, call.scale, call.side)
    assert isinstance(out, Tensor)
    return out if job.inverse is None else _moved(out, *job.inverse)


def prepared(job: Job) -> Executor | None:
    """Returns the executor of a job, or None if transformers' attention serves it.

    It waits only with dropout, and where autograd's tensors are saved by hooks, as in gradient checkpointing.
    A layer that is computed again must have the same attention.
    """
    for _ in range(STEPS):
        entry = deferred.entry_of(job.call, job.usual, caller="transformers")
        is_settled = entry is not None and entry.state is not State.PENDING
        if is_settled or (job.call.side.seed is None and saving_hooks(True) is None):
            break
        deferred.wait()
    if job.short is not None and entry is not None and entry.may_be_skipped:
        keep(_refused, job.short, True)
    return None if entry is None or entry.passes is None else entry.passes.executor


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    causal: bool,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
    others: dict[str, Any],
    drops: tuple[float, Tensor] | None = None,
    merges: bool = False,
) -> Job | None:
    """Returns the call of flashtune for a layer, or None if it computes no such call.

    `drops` are the fraction of weights to drop and the seed. `merges` is whether to merge a causal mask into
    a bias.
    """
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    scale = float(scaling) if isinstance(scaling, int) else scaling
    side = NO_EXTRA_INPUTS
    if softcap is not None or s_aux is not None:
        side = ExtraInputs(softcap=softcap, sinks=None if s_aux is None else s_aux.float())
    if drops is not None:
        side = side._replace(dropout=drops[0], seed=drops[1])
    pattern = None if mask is None else masks.pattern_of(mask, seqlen_q, seqlen_kv)
    starts = _starts(q, mask, seqlen_kv, others)
    if starts is not None:
        if position_bias is not None:
            return None
        structure = Structure(causal) if pattern is None else pattern.structure
        return _packed(q, k, v, scale, side, structure, starts)
    if position_bias is not None:
        return _biased(q, k, v, scale, side, causal, mask, pattern, position_bias, merges)
    is_half = q.dtype in HALF
    if mask is None:
        causal = causal and seqlen_q > 1
        if causal and seqlen_q != seqlen_kv:
            # As SDPA, the first query is at the first key.
            if seqlen_q > seqlen_kv:
                return None
            k, v = k[:, :, :seqlen_q], v[:, :, :seqlen_q]
        usual = None if side is not NO_EXTRA_INPUTS else _usual(q, k, v, None, causal)
        return Job(_dense(q, k, v, scale, side, Structure(causal)), usual)
    if pattern is None or pattern.structure.segments is not None:
        bias = masks.boolean_mask(mask, seqlen_q)
        if bias.dtype is not torch.bool and bias.dtype is not q.dtype:
            return None
        has_usual = side is NO_EXTRA_INPUTS and not (is_half and seqlen_q == 1)
        usual = _usual(q, k, v, bias, False) if has_usual else None
        return Job(_dense(q, k, v, scale, side._replace(bias=bias), Structure()), usual)
    structure, valid = pattern.structure, pattern.valid
    can_move = pattern.is_own and structure.causal and not structure.has_window
    if valid is not None and can_move and is_half and seqlen_q >= MIN_MOVED and side is NO_EXTRA_INPUTS:
        short = _short(q, k, v)
        if short in _refused:
            return None
        order, inverse = pattern.orders
        q, k, v = (_moved(one.transpose(1, 2), order, inverse).transpose(1, 2) for one in (q, k, v))
        return Job(_dense(q, k, v, scale, side, structure), None, (inverse, order), short)
    has_usual = side is NO_EXTRA_INPUTS and not is_half
    usual = _usual(q, k, v, masks.boolean_mask(mask, seqlen_q), False) if has_usual else None
    side = side._replace(bias=None if valid is None else valid[:, None, None], seqlens_kv=pattern.lengths)
    return Job(_dense(q, k, v, scale, side, structure), usual)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs,
    structure: Structure,
) -> Call:
    options = Options(
        "bottom_right" if structure.causal else "none",
        "bshd",
        window_left=structure.left,
        window_right=structure.right,
    )
    return Call(q.transpose(1, 2), k, v, scale, options, side)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs,
    structure: Structure,
    starts: tuple[Tensor, Tensor, int, int],
) -> Job:
    """Returns the call of packed sequences."""
    options = Options(
        "bottom_right" if structure.causal else "none",
        "thd",
        "thd",
        window_left=structure.left,
        window_right=structure.right,
        max_seqlen_q=starts[2],
        max_seqlen_k=starts[3],
    )
    side = side._replace(cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    q, k, v = (one[0].transpose(0, 1) for one in (q, k, v))
    return Job(Call(q, k, v, scale, options, side), None)


def _biased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs,
    causal: bool,
    mask: Tensor | None,
    pattern: masks.Pattern | None,
    bias: Tensor,
    merges: bool,
) -> Job | None:
    """Returns the call with a bias. Masks are merged with it, as SDPA has it.

    A causal mask alone stays apart, because kernels skip the blocks that it hides. If that job was refused,
    or with `merges`, the causal mask is merged too.
    """
    causal = causal and q.shape[2] > 1
    if mask is None and causal and q.shape[2] != k.shape[2]:
        return None
    is_causal = causal if mask is None else pattern is not None and pattern.is_causal_alone
    is_plain = side is NO_EXTRA_INPUTS
    drops = side.seed is not None
    alike = *_short(q, k, v), bias.shape, bias.requires_grad, is_causal, mask is None, is_plain, drops
    is_apart = is_causal and not merges and (*alike, True) not in _refused
    short = *alike, is_apart
    if short in _refused:
        return None
    if not is_apart and (causal or mask is not None):
        assert _bias_mask is not None
        mask = None if mask is None else masks.boolean_mask(mask, q.shape[2])
        bias = _bias_mask(bias, mask, causal, q, k)
    bias = bias.contiguous()
    if bias.dtype is not q.dtype:
        return None
    usual = _usual(q, k, v, bias, False) if is_plain else None
    call = _dense(q, k, v, scale, side._replace(bias=bias), Structure(is_apart))
    return Job(call, usual, None, short, is_apart)


def _short(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return q.device, q.dtype, q.shape, k.shape, v.shape, needs_grad


def _starts(
    q: Tensor, mask: Tensor | None, seqlen_kv: int, others: dict[str, Any]
) -> tuple[Tensor, Tensor, int, int] | None:
    """Returns where packed queries and keys begin, and the longest lengths.

    The result is None if nothing is packed, or if the mask may have padding.
    """
    starts_q, starts_k = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if starts_q is None or starts_k is None or q.shape[0] != 1:
        return None
    if mask is not None:
        pattern = masks.pattern_of(mask, q.shape[2], seqlen_kv)
        if pattern is None or pattern.valid is not None:
            return None
    longest_q, longest_k = others.get("max_length_q"), others.get("max_length_k")
    if not (isinstance(longest_q, int) and isinstance(longest_k, int)):
        longest_q = longest_k = q.shape[2]
    return starts_q.to(torch.int32), starts_k.to(torch.int32), longest_q, longest_k


def _usual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Returns the name of the backend that SDPA selects, or None for its unfused path and in compilers."""
    # With a mask, transformers repeats keys and values for all heads.
    return None if is_compiling() else chosen_backend(q[:, : k.shape[1]], k, v, mask, causal)


def _moved(tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Returns a tensor [batch, seqlen, heads, width] with its tokens in another order."""
    rows = tensor.reshape(len(order), -1)
    if rows.requires_grad and torch.is_grad_enabled():
        moved: Tensor = Moved.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    else:
        moved = rows.index_select(0, order)
    return moved.view(tensor.shape)


class Moved(torch.autograd.Function):
    """Rows in another order. The gradient is moved back without sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        moved: Tensor = Moved.apply(gradients[0], inverse, order)  # type: ignore[no-untyped-call]
        return moved, None, None
