"""`flex_call`: a call of attention with a score function and a mask function."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from flashtune.core.errors import ProblemError
from flashtune.core.features.functions import integers_of
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.layouts import memory_order
from flashtune.request.call import Call, dense_call, paged_call
from flashtune.request.functions.block_lists import (
    ListBlocks,
    block_lists,
    extents_of,
    is_flex_mask,
    mask_function,
    shows_band,
    unwritten_lists,
)
from flashtune.request.functions.built_in import built_in
from flashtune.request.functions.tracing import MAX_ELEMENTS, Traced, trace
from flashtune.request.side_inputs import check_kinds
from flashtune.request.tensor_checks import require_dense

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Sets of captured numbers of which the copies on a device are kept.
MAX_KEPT = 2**14


def flex_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    list_blocks: ListBlocks,
) -> Call:
    """Returns the record of a call of `flex_attention`, with the same arguments and errors.

    `list_blocks` returns the lists of blocks of a mask function without a block mask.
    """
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require_dense(name, tensor)
        if tensor.dim() != 4:
            raise ProblemError(f"{name} has {tensor.dim()} dimensions: pass [batch, heads, seqlen, head_dim]")
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ProblemError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: pass enable_gqa=True, or as many heads"
        )
    if k.shape[0] == v.shape[0] == 1 != q.shape[0]:
        # All sequences share the keys and values.
        k, v = (tensor.expand(q.shape[0], -1, -1, -1) for tensor in (k, v))
    mask_mod = mask_function(block_mask) if is_flex_mask(block_mask) else None
    traced = trace(score_mod, mask_mod)
    functions = traced.functions
    extents = extents_of(q, k)
    features = None
    if functions and all(table.device == q.device for table in traced.tables):
        trains, is_call = needs_grad(q, k, v, *traced.tables), list_blocks is not unwritten_lists
        features = built_in(traced, extents, trains, is_call=is_call)
    # Without a mask function, the lists are the whole mask. They may differ between calls.
    has_band = block_mask is None or functions.mask >= 0
    if features is not None and has_band and shows_band(block_mask, features.band, extents, q.device):
        return _ordered(dense_call(q, k, v, scale=scale, return_lse=return_lse, **features.options))
    # In blocks that the mask shows in full, hidden scores of the score function still hide keys.
    full_first = functions.mask >= 0 and not traced.hides_scores
    inputs: dict[str, Any] = _captured(traced, q.device)
    options: dict[str, Any] = {}
    lists = None
    if block_mask is not None:
        lists = block_lists(block_mask, q.shape[2], k.shape[2], full_first=full_first)
    elif functions.mask >= 0 and q.numel() and k.numel():
        captured = ExtraInputs(**inputs)
        # A kernel reads them.
        check_kinds(captured, q.device)
        lists = list_blocks(functions, extents, captured, q.device)
    if lists is not None:
        options["block_mask"] = lists.mask
        if lists.mask.counts.dim() == 3 and lists.mask.counts.shape[1] not in (1, q.shape[1]):
            raise ProblemError(
                f"block_mask has {lists.mask.counts.shape[1]} heads: pass 1, or {q.shape[1]} as query has"
            )
        if functions.mask >= 0:
            inputs["full_counts"] = lists.full_counts
    call = _ordered(dense_call(q, k, v, scale=scale, return_lse=return_lse, **options))
    return _with_functions(call, traced, inputs) if functions else call


def needs_grad(*tensors: Tensor) -> bool:
    """Returns whether autograd needs gradients of tensors."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def paged_flex_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **options: Any,
) -> Call:
    """Returns the record of a call of `attention_paged`, with its arguments and errors."""
    call = paged_call(q, k_cache, v_cache, block_table, kv_lengths, return_lse=return_lse, **options)
    if score_mod is None and mask_mod is None:
        return call
    traced = trace(score_mod, mask_mod)
    if not traced.functions:
        return call
    if call.options.causal == "top_left":
        raise ProblemError(
            "causal='top_left' does not go with score_mod or mask_mod: pass mask_mod a causal mask, and "
            "causal=False"
        )
    return _with_functions(call, traced, _captured(traced, q.device))


def _ordered(call: Call) -> Call:
    """Returns a call of which the output has the memory order of the query's dimensions, as in torch."""
    order = memory_order(call.q)
    return call._replace(options=call.options._replace(out_order=order)) if order else call


def _with_functions(call: Call, traced: Traced, inputs: dict[str, Any]) -> Call:
    return call._replace(
        options=call.options._replace(functions=traced.text), side=call.side._replace(**inputs)
    )


def _captured(traced: Traced, device: torch.device) -> dict[str, Tensor]:
    """Returns the captured values as extra inputs."""
    inputs: dict[str, Tensor] = {}
    for name, table in zip(TABLES, traced.tables, strict=False):
        if not table.numel():
            raise ProblemError("a captured tensor has no elements: pass one with some")
        reach = sum((size - 1) * stride for size, stride in zip(table.shape, table.stride(), strict=True))
        if reach > MAX_ELEMENTS:
            raise ProblemError(f"a captured tensor spans {reach} elements: pass a contiguous one")
        # Numbers as tensors are often on the CPU.
        inputs[name] = table.to(device) if not table.dim() else table
    tables = tuple(inputs.values())
    if traced.ints or tables:
        integers = tuple(integers_of(traced.ints, tables))
        inputs["function_ints"] = _numbers(integers or (0,), torch.int32, device)
    if traced.floats:
        inputs["function_floats"] = _numbers(traced.floats, torch.float32, device)
    return inputs


@functools.lru_cache(MAX_KEPT)
def _numbers(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers on a device. Equal ones share a tensor, so that repeated calls copy nothing."""
    # Later calls outside of inference mode may save it for a backward pass.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)
