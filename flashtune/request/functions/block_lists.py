"""Block masks of torch as lists of blocks for kernels."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.block_mask import BLOCK_SIZE, BlockMask
from flashtune.core.caches import keep
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import Functions, Op
from flashtune.core.features.masks import seen_blocks
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import MASK_BLOCKS
from flashtune.request.arguments import read_block_mask
from flashtune.request.functions.built_in import Band, Extents

# Bound once, because each call uses them. Only builds of torch for GPUs have them.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
FLEX_MODULE = "torch.nn.attention.flex_attention"
# The size of the one block of torch's mask that shows all keys. This mask fits calls of all lengths.
ONE_BLOCK = 1 << 30


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


# Returns the lists of a mask function for a call with these captured values, or None if it needs none. Lists
# among the captured values are written again.
ListBlocks = Callable[[Functions, Extents, ExtraInputs, torch.device], Lists | None]


class _Known(NamedTuple):
    """A result of a mask, valid while its tensors are the same."""

    key: tuple[object, ...]
    tensors: tuple[Tensor | None, ...]
    result: Any

    def is_of(self, key: tuple[object, ...], tensors: tuple[Tensor | None, ...]) -> bool:
        """Returns whether the result is that of these tensors."""
        pairs = zip(self.tensors, tensors, strict=True)
        return self.key == key and all(own is other for own, other in pairs)


_lists_of: "weakref.WeakKeyDictionary[Any, _Known]" = weakref.WeakKeyDictionary()
_bands_of: "weakref.WeakKeyDictionary[Any, _Known]" = weakref.WeakKeyDictionary()
# Programs that choose blocks in each call do not wait for the comparison of more masks than so many.
MAX_REFUSED = 4
_refused: Counter[tuple[object, ...]] = Counter()


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
    if tuple(mask.seq_lengths) != (seqlen_q, seqlen_kv) and min(mask.BLOCK_SIZE) < ONE_BLOCK:
        lengths = " and ".join(map(str, mask.seq_lengths))
        raise ProblemError(
            f"block_mask is for {lengths} queries and keys and the tensors have {seqlen_q} and {seqlen_kv}: "
            "create another one, or call its _adjust"
        )
    tensors, stream = mask_tensors(mask), stream_of(mask.kv_num_blocks.device)
    if stream is None or are_of_inference(tensors):
        return _lists(mask, seqlen_q, seqlen_kv, full_first)
    key = seqlen_q, seqlen_kv, full_first, stream, *_versions(tensors)
    known = _lists_of.get(mask)
    if known is None or not known.is_of(key, tensors):
        # Later calls outside of inference mode may save them for a backward pass.
        with torch.inference_mode(False):
            known = _Known(key, tensors, _lists(mask, seqlen_q, seqlen_kv, full_first))
        _lists_of[mask] = known
    lists: Lists = known.result
    return lists


def shows_band(mask: Any, band: Band, extents: Extents, device: torch.device) -> bool:
    """Returns whether a block mask shows the same pairs as a mask by distance, which is its mask function.

    The lists of torch's mask are compared on their device, once while they are the same. This synchronises
    with the host. Returns False if that is not possible, or if several masks of this kind differed.
    """
    if mask is None:
        return True
    if not is_flex_mask(mask) or tuple(mask.seq_lengths) != extents[2:]:
        return False
    counts, tensors = mask.kv_num_blocks, mask_tensors(mask)
    # Subclasses may have no values.
    if type(counts) is not Tensor or counts.device != device or device.type == "meta":
        return False
    if are_of_inference(tensors):
        return False
    kind = band, extents
    key = *kind, *_versions(tensors)
    known = _bands_of.get(mask)
    if known is None or not known.is_of(key, tensors):
        # A synchronisation would end the capture of a graph.
        if _refused[kind] >= MAX_REFUSED or stream_of(device) is None:
            return False
        known = _Known(key, tensors, _shows_band(mask, band, extents))
        _bands_of[mask] = known
        if not known.result:
            keep(_refused, kind, _refused[kind] + 1)
    return bool(known.result)


def mask_tensors(mask: Any) -> tuple[Tensor | None, ...]:
    """Returns the lists of torch's block mask."""
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def _versions(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Returns how often tensors were written to."""
    return tuple(-1 if tensor is None else tensor._version for tensor in tensors)


def are_of_inference(tensors: tuple[Tensor | None, ...]) -> bool:
    """Returns whether tensors do not count how often they were written to."""
    return any(tensor is not None and tensor.is_inference() for tensor in tensors)


def stream_of(device: torch.device) -> int | None:
    """Returns the current stream of a device, on which lists that it wrote are valid.

    Returns None while a graph is captured: the memory of new lists belongs to the graph.
    """
    if device.type != "cuda":
        return 0
    return None if is_capturing() else current_stream(device.index)


def extents_of(q: Tensor, k: Tensor) -> Extents:
    """Returns the extents of a call."""
    return Extents(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def unwritten_lists(
    functions: Functions, extents: Extents, captured: ExtraInputs, device: torch.device
) -> Lists:
    """Returns lists of blocks without values, for a mask function of a call.

    Sequences and heads share lists if the mask function does not depend on them.
    """
    if captured.block_counts is not None:
        assert captured.block_indices is not None
        assert captured.full_counts is not None
        return Lists(BlockMask(captured.block_counts, captured.block_indices), captured.full_counts)
    ops = {functions.nodes[place].op for place in functions.needed(functions.mask)}
    batch, heads = (
        extent if op in ops else 1 for op, extent in zip((Op.BATCH, Op.HEAD), extents, strict=False)
    )
    queries, keys = (-(-extent // BLOCK_SIZE) for extent in extents[2:])
    # Later calls outside of inference mode may save them for a backward pass.
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


def _shows_band(mask: Any, band: Band, extents: Extents) -> bool:
    """Compares the lists of torch's block mask with those of a mask by distance."""
    counts, sizes = mask.kv_num_blocks, mask.BLOCK_SIZE
    device, lengths = counts.device, extents[2:]
    blocks = [-(-length // size) for length, size in zip(lengths, sizes, strict=True)]
    outer = zip(counts.shape[:2], extents[:2], strict=True)
    if counts.dim() != 3 or counts.shape[2] != blocks[0] or any(own not in (1, full) for own, full in outer):
        return False
    (first_query, last_query), (first_key, last_key) = (
        (starts, (starts + size).clamp(max=length) - 1)
        for starts, size, length in (
            (torch.arange(0, length, size, device=device), size, length)
            for length, size in zip(lengths, sizes, strict=True)
        )
    )
    # The distances of a block, without gaps.
    least, most = first_query[:, None] - last_key, last_query[:, None] - first_key
    visible = full = torch.ones_like(least, dtype=torch.bool)
    if band.least is not None:
        visible, full = visible & (most >= band.least), full & (least >= band.least)
    if band.most is not None:
        visible, full = visible & (least <= band.most), full & (most <= band.most)
    listed = seen_blocks(counts, mask.kv_indices, blocks[1])
    wrong = torch.zeros_like(listed)
    if mask.full_kv_num_blocks is not None:
        listed_full = seen_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, blocks[1])
        listed, wrong = listed | listed_full, listed_full & ~full
    return not bool((wrong | (visible & ~listed)).any())


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
