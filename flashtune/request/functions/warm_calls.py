"""Records of calls that repeat, valid while their functions capture the same objects.

A function is not walked again. The places of its captured values are known: cells of closures, and names of
globals. A call compares the objects there with those of the call before.
"""

import types
import weakref
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled

from flashtune.core.caches import keep
from flashtune.core.expressions.nodes import Functions, Op
from flashtune.core.features.records import ExtraInputs
from flashtune.request.autocast import any_autocast
from flashtune.request.call import Call, Options
from flashtune.request.functions.block_lists import (
    ListBlocks,
    are_of_inference,
    extents_of,
    is_flex_mask,
    stream_of,
)
from flashtune.request.functions.call import ScoreMod, flex_call, needs_grad
from flashtune.request.functions.closures import Captured, captured_places
from flashtune.request.functions.tracing import is_stable
from flashtune.request.invariance import is_batch_invariant
from flashtune.request.read_call import known_functions

# Records of calls with one function.
MAX_CALLS = 64
mask_fields = itemgetter(
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("mask_mod", "seq_lengths", "BLOCK_SIZE"),
)
TENSOR_FIELDS = 4


class _Warm(NamedTuple):
    """The record of a call, without q, k and v, and all that it depends on."""

    options: Options
    side: ExtraInputs
    mask: "weakref.ref[Any] | None"
    places: list[Captured]
    # The fields of the block mask, and its tensors with how often each was written to.
    fields: tuple[Any, ...]
    versions: tuple[tuple[Tensor, int], ...]
    # The captured tensors, and their properties, which functions read, and assignments to `data` change.
    captured: tuple[Tensor, ...]
    layouts: list[object]
    # The functions, if calls list blocks themselves.
    listed: Functions | None
    # Whether these lists depend on elements of captured tensors, so that each call writes them.
    writes_lists: bool
    # The stream on which the lists were written, 0 without lists.
    stream: int
    # Calls of the record have it as their kind. None if gradients of captured tensors may be needed.
    kind: object

    def is_current(self) -> bool:
        """Returns whether the block mask lives, and the functions capture the same objects."""
        return (self.mask is None or self.mask() is not None) and all(map(Captured.is_same, self.places))


_warm: "weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], _Warm]]" = weakref.WeakKeyDictionary()


def warm_flex_call(
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
    """Returns the record of `flex_call`, with its arguments and errors, from an earlier call if possible."""
    # Functions outlive a call more often than masks.
    anchor = block_mask if score_mod is None else score_mod
    try:
        has_gradient = needs_grad(q, k, v)
        known = _warm.get(anchor)
        # Features serve fewer calls with gradients.
        kind = q.device, enable_gqa, return_lse, has_gradient, is_grad_enabled()
        # The output has the order of the query's strides.
        key = q.shape, k.shape, v.shape, q.stride(), *kind
        warm = None if known is None else known.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return flex_call(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse, list_blocks)
    is_usual = type(return_lse) is bool and not any_autocast() and not is_batch_invariant()
    # Keys that a batch shares are expanded.
    is_usual = is_usual and q.shape[:1] == k.shape[:1]
    if warm is not None and is_usual and _is_same(warm, block_mask):
        side = warm.side
        if side.block_counts is None:
            return Call(q, k, v, scale, warm.options, side, 0, warm.kind)
        is_here = warm.stream == stream_of(q.device)
        if is_here and not warm.writes_lists:
            return Call(q, k, v, scale, warm.options, side, 0, warm.kind)
        if warm.listed is not None:
            if not is_here or has_gradient or warm.kind is None:
                # A backward pass, or a graph, keeps the lists.
                side = side._replace(block_counts=None, block_indices=None, full_counts=None)
            lists = list_blocks(warm.listed, extents_of(q, k), side, q.device)
            if side is not warm.side:
                side = side._replace(**lists.inputs)  # type: ignore[union-attr]
            return Call(q, k, v, scale, warm.options, side, 0, warm.kind)
    call = flex_call(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse, list_blocks)
    if is_usual:
        _keep(anchor, key, call, score_mod, block_mask)
    return call


def _is_same(warm: _Warm, block_mask: Any) -> bool:
    """Returns whether a record is that of a call with a block mask."""
    # The reference to a dead mask is None too.
    if warm.mask is None:
        if block_mask is not None:
            return False
    else:
        if block_mask is None or warm.mask() is not block_mask:
            return False
        if not all(map(is_, mask_fields(block_mask.__dict__), warm.fields)):
            return False
        for tensor, version in warm.versions:
            if tensor._version != version:
                return False
    return warm.layouts == _layouts(warm.captured) and all(map(Captured.is_same, warm.places))


def _layouts(captured: tuple[Tensor, ...]) -> list[object]:
    return [
        (table.dtype, table.device, table.shape, table.stride(), table.requires_grad, table.is_neg())
        for table in captured
    ]


def _keep(
    anchor: Any, key: tuple[object, ...], call: Call, score_mod: ScoreMod | None, block_mask: Any
) -> None:
    """Keeps the record of a call, if all that it depends on can be compared."""
    fields: tuple[Any, ...] = ()
    mask_mod = None
    if block_mask is not None:
        if not is_flex_mask(block_mask):
            return
        fields = mask_fields(block_mask.__dict__)
        mask_mod = block_mask.mask_mod
        if are_of_inference(fields[:TENSOR_FIELDS]):
            # These do not count how often they were written to.
            return
    given = [function for function in (score_mod, mask_mod) if function is not None]
    functions = [function for function in given if isinstance(function, types.FunctionType)]
    places = captured_places(functions)
    if len(functions) < len(given) or places is None or not is_stable(score_mod, mask_mod):
        return
    captured = tuple(places.tensors)
    if not all(table.dim() for table in captured):
        # A number in a tensor of another device was copied.
        return
    stream = stream_of(call.q.device) if call.side.block_counts is not None else 0
    if stream is None:
        return
    listed, writes_lists = None, False
    if block_mask is None and call.side.full_counts is not None:
        listed = known_functions(str(call.options.functions))
        writes_lists = Op.LOAD in {listed.nodes[place].op for place in listed.needed(listed.mask)}
    is_trained = any(table.requires_grad for table in captured)
    warm = _Warm(
        call.options,
        call.side,
        None if block_mask is None else weakref.ref(block_mask),
        places.functions,
        fields,
        tuple((tensor, tensor._version) for tensor in fields[:TENSOR_FIELDS] if tensor is not None),
        captured,
        _layouts(captured),
        listed,
        writes_lists,
        stream,
        None if is_trained or any(table.is_neg() for table in captured) else object(),
    )
    known = _warm.setdefault(anchor, {})
    # Records of dead masks, and of other captured objects, keep tensors alive.
    for other in [other for other, record in known.items() if not record.is_current()]:
        del known[other]
    keep(known, key, warm, MAX_CALLS)
