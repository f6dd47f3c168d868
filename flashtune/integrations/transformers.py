"""Serves the attention of transformers' models by flashtune.

    import flashtune.integrations.transformers

    name = flashtune.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=name)

A call that flashtune does not compute, or not faster, goes to transformers' `sdpa` attention. Where `sdpa`
would ignore softcap or sinks, it goes to the `eager` attention of the model. Both also serve until kernels
are compiled on a worker thread. Compiled models compile their kernels at the first call.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from flashtune.core.caches import keep
from flashtune.core.errors import UsageError
from flashtune.integrations import transformers_masks as masks
from flashtune.integrations.host_library import host_attribute, host_library
from flashtune.integrations.transformers_jobs import Job, Layer, job_of, layer_of, moved, refused_jobs
from flashtune.request.request import Executor
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import is_compiling, is_tracing, runs_eagerly
from flashtune.runtime.torch_ops import call_operator

__all__ = ["attention", "register"]

NEEDED = ("5.17", "6")
SDPA = "transformers.integrations.sdpa_attention"
# Devices on which flashtune serves. Tests replace it by the CPU, and `prepared` by a function that computes.
DEVICES = {"cuda"}
TAKEN = ("eager", "sdpa", "flex_attention")
# Looks at a new kind of call: before its preparation, and after it.
STEPS = 2

# Transformers' attention function, set by `register`.
_sdpa_attention: Callable[..., tuple[Tensor, None]] | None = None
# torch has no public function for this.
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


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
    global _sdpa_attention
    if "flash" in name:
        raise UsageError(
            f"name is {name!r}: transformers loads names with 'flash' from its Hub, pass another"
        )
    if not name or name in TAKEN or not name.isidentifier():
        raise UsageError(f"name is {name!r}: pass a new one of letters, digits and underscores")
    functions = host_attribute("transformers.modeling_utils", "AttentionInterface", *NEEDED)
    mask_functions = host_attribute(masks.MODULE, "AttentionMaskInterface", *NEEDED)
    masks.host = host_library(masks.MODULE, *NEEDED)
    _sdpa_attention, masks.bias_mask = (
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
    layer = layer_of((query, key, value), attention_mask, position_bias, causal, scaling, others)
    has_computed_dropout = not dropout or (computes_dropout and dropout < 1.0)
    if has_computed_dropout and not others.get("output_attentions"):
        out = _computed(layer, softcap, s_aux, dropout)
        if out is not None:
            return out.reshape(query.shape[0], query.shape[2], *out.shape[-2:]).contiguous(), None
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if softcap is None and s_aux is None:
        assert _sdpa_attention is not None
        options |= {"is_causal": is_causal, "position_bias": position_bias}
        return _sdpa_attention(module, query, key, value, _complete_mask(layer), **options, **others)
    return _eager(module, layer, softcap=softcap, s_aux=s_aux, **options, **others)


def _computed(layer: Layer, softcap: float | None, sinks: Tensor | None, dropout: float) -> Tensor | None:
    """Returns the output of a layer by flashtune, or None if transformers' attention serves it."""
    operands = layer.q, layer.k, layer.v
    is_eager = runs_eagerly(*operands) and not is_tracing()
    if layer.q.device.type not in DEVICES or not (is_compiling() or is_eager):
        return None
    layer = layer.casted()
    if not layer.q.dtype is layer.k.dtype is layer.v.dtype:
        return None
    layer = layer.with_features(softcap, sinks, dropout)
    job = job_of(layer)
    out = None if job is None else _served(job)
    if out is None and job is not None and (job.is_apart or job.short in refused_jobs):
        # A bias has a second job, with the causal mask merged into it. It is prepared at the same time.
        job = job_of(layer, merges=job.is_apart)
        out = None if job is None else _served(job)
    return out


def _complete_mask(layer: Layer) -> Tensor | None:
    """Returns the mask of a layer for transformers' attention, with that of packed sequences."""
    mask = None if layer.mask is None else masks.boolean_mask(layer.mask, layer.seqlen_q)
    if layer.starts is None:
        return mask
    packed = masks.packed_mask(*layer.starts[:2], layer.seqlen_q, layer.seqlen_kv, layer.causal)
    return packed if mask is None else mask & packed


def _eager(module: Module, layer: Layer, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the attention of one layer by the `eager` attention of the model.

    Raises:
        UsageError: The model has none.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UsageError(
            f"{type(module).__name__} has softcap or sinks and no eager attention: use another implementation"
        )
    q, mask = layer.q, _complete_mask(layer)
    if mask is None and layer.causal and layer.seqlen_q > 1:
        mask = torch.ones(1, 1, layer.seqlen_q, layer.seqlen_kv, dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    result: tuple[Tensor, Tensor | None] = eager(module, q, layer.k, layer.v, mask, **options)
    return result


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
    return out if job.inverse is None else moved(out, *job.inverse)


def prepared(job: Job) -> Executor | None:
    """Returns the executor of a job, or None if transformers' attention serves it.

    It waits only with dropout, and where autograd's tensors are saved by hooks, as in gradient checkpointing.
    A layer that is computed again must have the same attention.
    """
    for _ in range(STEPS):
        entry = SESSION.entry(job.call, job.usual, caller="transformers")
        is_settled = entry is not None and (entry.passes is not None or entry.is_refused)
        if is_settled or (job.call.side.seed is None and saving_hooks(True) is None):
            break
        SESSION.wait()
    if job.short is not None and entry is not None and entry.may_be_skipped:
        keep(refused_jobs, job.short, True)
    return None if entry is None or entry.passes is None else entry.passes.executor
