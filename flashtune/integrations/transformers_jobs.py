"""The calls of flashtune for layers of transformers' models.

`job_of` recognises the kind of a layer's mask by a table, and returns the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.dispatch.sdpa import chosen_backend
from flashtune.dispatch.sdpa_times import MATH
from flashtune.integrations import transformers_masks as masks
from flashtune.integrations.transformers_masks import Structure
from flashtune.request.autocast import autocast, autocast_dtype
from flashtune.request.call import Call, Options
from flashtune.request.dropout import draw_seed
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import is_compiling

HALF = (torch.bfloat16, torch.float16)
# Padding is moved behind the tokens of each sequence if there are at least so many queries. Shorter sequences
# take longer to move than their masks to read.
MIN_MOVED = 256

# Properties of layers that flashtune does not serve, so that their tensors are not made again.
refused_jobs = SESSION.refused_jobs


class Job(NamedTuple):
    """A call of flashtune for a layer."""

    call: Call  # The call. Its output is [batch, seqlen_q, heads, value_head_dim], or packed.
    # Name of the replaced operator in records, or None if it has no measurements.
    usual: str | None
    # The places of tokens in the output, if padding was moved. None otherwise.
    inverse: tuple[Tensor, Tensor] | None = None
    # The properties that distinguish jobs with tensors of their own. None for other jobs.
    short: tuple[object, ...] | None = None
    is_apart: bool = False  # Whether the call has a bias and a causal mask, which could be merged.


class Layer(NamedTuple):
    """The attention of one layer: its inputs, and the facts that follow from them. `layer_of` makes it."""

    q: Tensor  # [batch, heads, seqlen_q, head_dim].
    k: Tensor  # [batch, kv_heads, seqlen_kv, head_dim].
    v: Tensor  # [batch, kv_heads, seqlen_kv, value_head_dim].
    mask: Tensor | None  # A mask of `transformers_masks`, an additive mask, or None.
    bias: Tensor | None  # Bias that is added to the scores, or None.
    causal: bool  # Whether queries see no later keys, if there is no mask.
    scale: float | None  # Factor of the scores, or None.
    side: ExtraInputs  # The softcap, the sinks and the dropout.
    seqlen_q: int
    seqlen_kv: int
    pattern: masks.Pattern | None  # The pattern of the mask, or None if it is not known.
    # Where packed queries and keys begin, and the longest lengths. None if nothing is packed, or if the mask
    # may have padding.
    starts: tuple[Tensor, Tensor, int, int] | None

    @property
    def is_half(self) -> bool:
        """Whether the tensors have 16-bit types."""
        return self.q.dtype in HALF

    @property
    def is_plain(self) -> bool:
        """Whether there are no softcap, sinks and dropout."""
        return self.side is NO_EXTRA_INPUTS

    @property
    def moves_padding(self) -> bool:
        """Whether the padding of each sequence is moved behind its tokens."""
        pattern = self.pattern
        if pattern is None or pattern.valid is None or not pattern.is_own:
            return False
        is_causal_alone = pattern.structure.causal and not pattern.structure.has_window
        return is_causal_alone and self.is_half and self.is_plain and self.seqlen_q >= MIN_MOVED

    @property
    def short(self) -> tuple[object, ...]:
        """The properties that distinguish layers whose jobs have tensors of their own."""
        q, k, v = self.q, self.k, self.v
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return q.device, q.dtype, q.shape, k.shape, v.shape, needs_grad

    def casted(self) -> Layer:
        """Returns the layer with the types of autocast. Compilers see the casts of the operators."""
        dtype = None if is_compiling() else autocast_dtype(self.q.device)
        if dtype is None:
            return self
        q, k, v = (autocast(tensor, dtype) for tensor in (self.q, self.k, self.v))
        mask, bias = (
            None if tensor is None else autocast(tensor, dtype) for tensor in (self.mask, self.bias)
        )
        return self._replace(q=q, k=k, v=v, mask=mask, bias=bias)

    def with_features(self, softcap: float | None, sinks: Tensor | None, dropout: float) -> Layer:
        """Returns the layer with a softcap, sinks of any type, and dropout with a new seed."""
        if softcap is None and sinks is None and not dropout:
            return self
        side = self.side
        if softcap is not None or sinks is not None:
            side = ExtraInputs(softcap=softcap, sinks=None if sinks is None else sinks.float())
        if dropout:
            side = side._replace(dropout=dropout, seed=draw_seed(self.q.device))
        return self._replace(side=side)


def layer_of(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    others: dict[str, Any],
) -> Layer:
    """Returns a layer without softcap, sinks and dropout. `others` may describe packed sequences."""
    q, k, v = tensors
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    pattern = None if mask is None else masks.pattern_of(mask, seqlen_q, seqlen_kv)
    may_have_padding = mask is not None and (pattern is None or pattern.valid is not None)
    starts = None if may_have_padding or q.shape[0] != 1 else _starts(others, seqlen_q)
    scale = float(scale) if isinstance(scale, int) else scale
    return Layer(q, k, v, mask, bias, causal, scale, NO_EXTRA_INPUTS, seqlen_q, seqlen_kv, pattern, starts)


def _starts(others: dict[str, Any], seqlen: int) -> tuple[Tensor, Tensor, int, int] | None:
    """Returns the starts of packed sequences, and the longest lengths: all tokens' if they are not stated."""
    starts_q, starts_k = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if starts_q is None or starts_k is None:
        return None
    longest_q, longest_k = others.get("max_length_q"), others.get("max_length_k")
    if not (isinstance(longest_q, int) and isinstance(longest_k, int)):
        longest_q = longest_k = seqlen
    return starts_q.to(torch.int32), starts_k.to(torch.int32), longest_q, longest_k


def job_of(layer: Layer, merges: bool = False) -> Job | None:
    """Returns the call of flashtune for a layer, or None if it computes no such call.

    `merges` is whether to merge a causal mask into a bias.
    """
    if layer.bias is not None and layer.starts is None:
        return _biased(layer, layer.bias, merges)
    for recognises, make in RECOGNISERS:
        if recognises(layer):
            return make(layer)
    return _patterned(layer)


def _packed(layer: Layer) -> Job | None:
    """Returns the call of packed sequences."""
    if layer.bias is not None:
        return None
    assert layer.starts is not None
    starts_q, starts_k, longest_q, longest_k = layer.starts
    structure = Structure(layer.causal) if layer.pattern is None else layer.pattern.structure
    options = Options(
        "bottom_right" if structure.causal else "none",
        "thd",
        "thd",
        window_left=structure.left,
        window_right=structure.right,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )
    side = layer.side._replace(cu_seqlens_q=starts_q, cu_seqlens_kv=starts_k)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (layer.q, layer.k, layer.v))
    return Job(Call(q, k, v, layer.scale, options, side), None)


def _unmasked(layer: Layer) -> Job | None:
    """Returns the call without a mask but the causal one."""
    q, k, v = layer.q, layer.k, layer.v
    causal = layer.causal and layer.seqlen_q > 1
    if causal and layer.seqlen_q != layer.seqlen_kv:
        # As SDPA, the first query is at the first key.
        if layer.seqlen_q > layer.seqlen_kv:
            return None
        k, v = k[:, :, : layer.seqlen_q], v[:, :, : layer.seqlen_q]
    baseline = _usual(q, k, v, None, causal) if layer.is_plain else None
    return Job(_dense(q, k, v, layer.scale, layer.side, Structure(causal)), baseline)


def _masked(layer: Layer) -> Job | None:
    """Returns the call with a mask that kernels read."""
    assert layer.mask is not None
    q, k, v = layer.q, layer.k, layer.v
    bias = masks.boolean_mask(layer.mask, layer.seqlen_q)
    if bias.dtype is not torch.bool and bias.dtype is not q.dtype:
        return None
    has_usual = layer.is_plain and not (layer.is_half and layer.seqlen_q == 1)
    baseline = _usual(q, k, v, bias, False) if has_usual else None
    return Job(_dense(q, k, v, layer.scale, layer.side._replace(bias=bias), Structure()), baseline)


def _with_moved_padding(layer: Layer) -> Job | None:
    """Returns the call with the padding of each sequence behind its tokens."""
    assert layer.pattern is not None
    short = layer.short
    if short in refused_jobs:
        return None
    order, inverse = layer.pattern.orders
    q, k, v = (
        moved(tensor.transpose(1, 2), order, inverse).transpose(1, 2)
        for tensor in (layer.q, layer.k, layer.v)
    )
    call = _dense(q, k, v, layer.scale, layer.side, layer.pattern.structure)
    return Job(call, None, (inverse, order), short)


def _patterned(layer: Layer) -> Job | None:
    """Returns the call with the pattern of a mask."""
    assert layer.mask is not None
    assert layer.pattern is not None
    q, k, v, valid = layer.q, layer.k, layer.v, layer.pattern.valid
    has_usual = layer.is_plain and not layer.is_half
    baseline = _usual(q, k, v, masks.boolean_mask(layer.mask, layer.seqlen_q), False) if has_usual else None
    side = layer.side._replace(
        bias=None if valid is None else valid[:, None, None], seqlens_kv=layer.pattern.lengths
    )
    return Job(_dense(q, k, v, layer.scale, side, layer.pattern.structure), baseline)


# Whether a layer is of a kind, and the function that makes its job. The first kind that fits counts. Other
# layers have the pattern of a mask.
RECOGNISERS: tuple[tuple[Callable[[Layer], bool], Callable[[Layer], Job | None]], ...] = (
    (lambda layer: layer.starts is not None, _packed),
    (lambda layer: layer.mask is None, _unmasked),
    (lambda layer: layer.pattern is None or layer.pattern.structure.segments is not None, _masked),
    (lambda layer: layer.moves_padding, _with_moved_padding),
)


def _biased(layer: Layer, bias: Tensor, merges: bool) -> Job | None:
    """Returns the call with a bias. Masks are merged with it, as SDPA has it.

    A causal mask alone stays apart, because kernels skip the blocks that it hides. If that job was refused,
    or with `merges`, the causal mask is merged too.
    """
    q, k, v, mask, pattern = layer.q, layer.k, layer.v, layer.mask, layer.pattern
    causal = layer.causal and layer.seqlen_q > 1
    if mask is None and causal and layer.seqlen_q != layer.seqlen_kv:
        return None
    is_causal = causal if mask is None else pattern is not None and pattern.is_causal_alone
    of_bias = bias.shape, bias.requires_grad, is_causal, mask is None
    alike = *layer.short, *of_bias, layer.is_plain, layer.side.seed is not None
    is_apart = is_causal and not merges and (*alike, True) not in refused_jobs
    short = *alike, is_apart
    if short in refused_jobs:
        return None
    if not is_apart and (causal or mask is not None):
        assert masks.bias_mask is not None
        mask = None if mask is None else masks.boolean_mask(mask, layer.seqlen_q)
        bias = masks.bias_mask(bias, mask, causal, q, k)
    bias = bias.contiguous()
    if bias.dtype is not q.dtype:
        return None
    baseline = _usual(q, k, v, bias, False) if layer.is_plain else None
    call = _dense(q, k, v, layer.scale, layer.side._replace(bias=bias), Structure(is_apart))
    return Job(call, baseline, None, short, is_apart)


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


def _usual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Returns the name of the backend that SDPA selects, or None for its unfused path and in compilers."""
    # With a mask, transformers repeats keys and values for all heads.
    if is_compiling():
        return None
    backend = chosen_backend(q[:, : k.shape[1]], k, v, mask, causal)
    return None if backend == MATH else backend


def moved(tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Returns a tensor [batch, seqlen, heads, width] with its tokens in another order."""
    rows = tensor.reshape(len(order), -1)
    if rows.requires_grad and torch.is_grad_enabled():
        rows = Moved.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    else:
        rows = rows.index_select(0, order)
    return rows.view(tensor.shape)


class Moved(torch.autograd.Function):
    """Rows in another order. The gradient is moved back without sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Returns the rows in the order."""
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient in the order before."""
        order, inverse = ctx.saved_tensors
        moved: Tensor = Moved.apply(gradients[0], inverse, order)  # type: ignore[no-untyped-call]
        return moved, None, None
