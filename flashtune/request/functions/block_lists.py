"""Block masks of torch as lists of blocks for kernels."""

import functools
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.block_mask import BLOCK_SIZE, BlockMask
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.intervals import Interval, block_visibility
from flashtune.core.expressions.nodes import Functions, Op
from flashtune.core.features.masks import seen_blocks
from flashtune.core.problem import MASK_BLOCKS
from flashtune.request.arguments import read_block_mask

# Classified masks of which lists are kept.
MAX_CLASSIFIED = 256
FLEX_MODULE = "torch.nn.attention.flex_attention"


class Lists(NamedTuple):
    """The lists of a block mask, and the number of first blocks that a mask function shows in full."""

    mask: BlockMask
    full_counts: Tensor  # Int32, as `mask.counts`.


class _Known(NamedTuple):
    """Lists of a mask, valid while its tensors are the same."""

    key: tuple[object, ...]
    lists: Lists


_known: "weakref.WeakKeyDictionary[Any, _Known]" = weakref.WeakKeyDictionary()


def is_flex_mask(mask: object) -> bool:
    """Returns whether a mask is torch's `BlockMask`. Its module is loaded if there is one."""
    module = sys.modules.get(FLEX_MODULE)
    return module is not None and isinstance(mask, module.BlockMask)


def mask_function(mask: Any) -> Any:
    """Returns the mask function of torch's block mask."""
    function = mask.mask_mod
    if getattr(function, "__name__", "") == "_sliced_mask_mod_error":
        raise ProblemError("block_mask was sliced and has lost its mask_mod: assign block_mask.mask_mod")
    return function


def block_lists(mask: Any, seqlen_q: int, seqlen_kv: int, *, full_first: bool) -> Lists:
    """Returns the lists of a block mask of torch or flashtune.

    With `full_first`, the blocks that torch's mask shows in full are first in each list, and others follow.
    Otherwise lists ascend, and the mask function has an effect in all blocks.

    Raises:
        ProblemError: The mask has other lengths, or blocks of a size that kernels do not support.
    """
    if not is_flex_mask(mask):
        own = read_block_mask(mask)
        return Lists(own, torch.zeros_like(own.counts))
    if tuple(mask.seq_lengths) != (seqlen_q, seqlen_kv):
        lengths = " and ".join(map(str, mask.seq_lengths))
        raise ProblemError(
            f"block_mask is for {lengths} queries and keys and the tensors have {seqlen_q} and {seqlen_kv}: "
            "create another one, or call its _adjust"
        )
    tensors = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):
        # Inference tensors do not count how often they were written to.
        return _lists(mask, seqlen_q, seqlen_kv, full_first)
    key = (
        seqlen_q,
        seqlen_kv,
        full_first,
        *((None if tensor is None else (id(tensor), tensor._version)) for tensor in tensors),
    )
    known = _known.get(mask)
    if known is None or known.key != key:
        known = _Known(key, _lists(mask, seqlen_q, seqlen_kv, full_first))
        _known[mask] = known
    return known.lists


@functools.lru_cache(MAX_CLASSIFIED)
def classified_lists(
    functions: Functions,
    extents: tuple[int, int, int, int],
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    device: torch.device,
) -> Lists:
    """Returns lists of the blocks in which a mask function may show a key, by interval arithmetic.

    `extents` are the numbers of sequences, heads, queries and keys. All heads share the lists. A region of
    blocks is divided while the mask function may show some of its keys and hide others.
    """
    size = BLOCK_SIZE
    shape = [-(-extent // size) for extent in extents[2:]]
    # 2 if a block is visible in full, 1 if in part.
    seen = torch.zeros(shape, dtype=torch.int32)
    regions = [(0, shape[0], 0, shape[1])]
    places = {
        op: Interval(0, extent - 1) for op, extent in zip((Op.BATCH, Op.HEAD), extents[:2], strict=True)
    }
    while regions:
        top, bottom, left, right = regions.pop()
        if top == bottom or left == right:
            continue
        places[Op.QUERY] = Interval(top * size, min(bottom * size, extents[2]) - 1)
        places[Op.KEY] = Interval(left * size, min(right * size, extents[3]) - 1)
        visible = block_visibility(functions, places, ints, floats)
        if visible is None and (bottom - top, right - left) != (1, 1):
            row, column = (top + bottom + 1) // 2, (left + right + 1) // 2
            regions += [
                (*rows, *columns)
                for rows in ((top, row), (row, bottom))
                for columns in ((left, column), (column, right))
            ]
        else:
            seen[top:bottom, left:right] = 1 if visible is None else 2 * visible
    if extents[3] % size:
        seen[:, -1].clamp_(max=1)
    return _ordered(seen[None, None].to(device), size)


def _ordered(seen: Tensor, size: int) -> Lists:
    """Returns lists of blocks, those with 2 first and then those with 1."""
    counts, full = ((seen >= least).sum(-1, dtype=torch.int32) for least in (1, 2))
    indices = seen.argsort(dim=-1, stable=True, descending=True).int()
    return Lists(BlockMask(counts, indices, size), full)


def _lists(mask: Any, seqlen_q: int, seqlen_kv: int, full_first: bool) -> Lists:
    sizes = tuple(mask.BLOCK_SIZE)
    size = next((own for own in reversed(MASK_BLOCKS) if not any(other % own for other in sizes)), None)
    if size is None:
        raise ProblemError(f"block_mask has blocks of {sizes[0]} by {sizes[1]}: kernels take multiples of 64")
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices, sizes, size, seqlen_q, seqlen_kv)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices, sizes, size, seqlen_q, seqlen_kv)
    seen = partial | full
    if seqlen_kv % size:
        # The last block has keys that do not exist.
        full[..., -1] = False
    return _ordered(seen.int() + full if full_first else seen.int(), size)


def _blocks(
    counts: Tensor, indices: Tensor, sizes: tuple[int, ...], size: int, seqlen_q: int, seqlen_kv: int
) -> Tensor:
    """Returns whether lists have blocks of the kernels' size: bool [batch, heads, blocks, blocks]."""
    queries, keys = (
        torch.arange(-(-length // size), device=counts.device) * size // own
        for length, own in zip((seqlen_q, seqlen_kv), sizes, strict=True)
    )
    seen = seen_blocks(counts, indices, -(-seqlen_kv // sizes[1]))
    return seen[..., queries, :][..., keys]
