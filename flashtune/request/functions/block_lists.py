"""Block masks of torch as lists of blocks for kernels."""

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.block_mask import BLOCK_SIZE, BlockMask
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import Functions, Op
from flashtune.core.features.masks import seen_blocks
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import MASK_BLOCKS
from flashtune.request.arguments import read_block_mask

FLEX_MODULE = "torch.nn.attention.flex_attention"


# Sequences, heads, queries and keys.
Extents = tuple[int, int, int, int]


class Lists(NamedTuple):
    """The lists of a block mask, and the number of first blocks that a mask function shows in full."""

    mask: BlockMask
    full_counts: Tensor  # Int32, as `mask.counts`.

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The lists as extra inputs of a call."""
        return {
            "block_counts": self.mask.counts,
            "block_indices": self.mask.indices,
            "full_counts": self.full_counts,
        }


# Returns the lists of a mask function for a call with these captured values, or None if it needs none.
ListBlocks = Callable[[Functions, Extents, ExtraInputs, torch.device], Lists | None]


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
    stream = stream_of(mask.kv_num_blocks.device)
    if stream is None:
        return _lists(mask, seqlen_q, seqlen_kv, full_first)
    key = (
        seqlen_q,
        seqlen_kv,
        full_first,
        stream,
        *((None if tensor is None else (id(tensor), tensor._version)) for tensor in tensors),
    )
    known = _known.get(mask)
    if known is None or known.key != key:
        known = _Known(key, _lists(mask, seqlen_q, seqlen_kv, full_first))
        _known[mask] = known
    return known.lists


def stream_of(device: torch.device) -> int | None:
    """Returns the current stream of a device, on which lists that it wrote are valid.

    Returns None while a graph is captured: the memory of new lists belongs to the graph.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


def extents_of(q: Tensor, k: Tensor) -> Extents:
    """Returns the extents of a call."""
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2]


def unwritten_lists(
    functions: Functions, extents: Extents, captured: ExtraInputs, device: torch.device
) -> Lists:
    """Returns lists of blocks without values, for a mask function of a call.

    Sequences and heads share lists if the mask function does not depend on them.
    """
    del captured
    ops = {functions.nodes[place].op for place in functions.needed(functions.mask)}
    batch, heads = (
        extent if op in ops else 1 for op, extent in zip((Op.BATCH, Op.HEAD), extents, strict=False)
    )
    queries, keys = (-(-extent // BLOCK_SIZE) for extent in extents[2:])
    # Later calls outside of inference mode may use them.
    with torch.inference_mode(False):
        indices = torch.empty(batch, heads, queries, keys, dtype=torch.int32, device=device)
        counts, full = (torch.empty(indices.shape[:3], dtype=torch.int32, device=device) for _ in range(2))
    return Lists(BlockMask(counts, indices, BLOCK_SIZE), full)


def ordered_lists(seen: Tensor, size: int) -> Lists:
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
    return ordered_lists(seen.int() + full if full_first else seen.int(), size)


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
