"""Checks of the values of lengths, starts, block tables and slots, which kernels use without checks.

Reading values from a GPU synchronizes, so calls on a GPU are checked only with `FLASHTUNE_CHECK=1`. On the
CPU calls are always checked. An executor is wrapped once, when it is prepared, so that there is no overhead
without the check.
"""

import functools

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.machine import CHECK_VARIABLE, variable
from flashtune.core.problem import KvScale, Problem
from flashtune.dispatch.platform import PLATFORM, Platform
from flashtune.request.request import Executor, Request, Result


def values_are_checked(device: torch.device) -> bool:
    """Whether values on a device are checked: on the CPU, and if `FLASHTUNE_CHECK` is set."""
    asked = variable(CHECK_VARIABLE) not in ("", "0")
    return device.type == "cpu" or (asked and device.type != "meta")


def with_checks(executor: Executor, request: Request, platform: Platform = PLATFORM) -> Executor:
    """Returns an executor that checks the values of each call's lengths, or `executor` without checks."""
    problem = request.problem
    lengths = problem.packed or problem.page_size or problem.kv_lengths or problem.prefix
    has_scales = problem.dtype.is_quantized or problem.kv_dtype is not None
    has_values = lengths or problem.block_mask or has_scales
    if not has_values or not values_are_checked(request.device):
        return executor
    return functools.partial(_checked, executor, request, platform)


def check_slot_values(slots: Tensor, rows: int) -> None:
    """Checks the slots of rows that are appended to a cache.

    `slots` are int64 [tokens]; negative slots are skipped. `rows` is the number of rows of all pages.
    """
    if is_capturing(slots):
        return
    index = _first(slots >= rows)
    if index is not None:
        raise ProblemError(
            f"slots[{index[0]}] is {_at(slots, index)} and the cache has {rows} rows: pass slots as "
            "PagedKVCache.extend gives them"
        )
    ordered, order = slots.sort(stable=True)
    index = _first((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    if index is not None:
        first, other = order[index[0]].item(), order[index[0] + 1].item()
        raise ProblemError(
            f"slots[{first}] and slots[{other}] are both {_at(slots, (int(other),))}: pass each slot once"
        )


def check_values(request: Request, q: Tensor, k: Tensor, side: ExtraInputs) -> None:
    """Checks the values of a call's lengths, starts and block table.

    Queries, and keys or pages, are in the call's layout.
    """
    problem = request.problem
    if side.cu_seqlens_q is not None:
        longest = problem.seqlen_q if side.tree is None else side.tree.shape[1]
        _check_starts("cu_seqlens_q", side.cu_seqlens_q, "q", q.shape[0], longest)
    if side.cu_seqlens_kv is not None:
        _check_starts("cu_seqlens_k", side.cu_seqlens_kv, "k", k.shape[0], problem.seqlen_kv)
    if side.seqlens_kv is not None:
        if side.block_table is None:
            _check_lengths("kv_lengths", side.seqlens_kv, "k", problem.seqlen_kv)
        else:
            check_pages(problem, side.block_table, side.seqlens_kv, k.shape[0])
    if side.block_counts is not None and side.block_indices is not None:
        _check_lists(problem, side.block_counts, side.block_indices, side.full_counts)
    if problem.kv_scale is not KvScale.PAGE:
        _check_scales(("q_scale", side.q_scale), ("k_scale", side.k_scale))
    index = None if side.prefix is None else _first(side.prefix < 0)
    if side.prefix is not None and index is not None:
        raise ProblemError(
            f"prefix_lengths[{index[0]}] is {_at(side.prefix, index)}: pass 0 for a sequence without a prefix"
        )


def _check_scales(*scales: tuple[str, Tensor | None]) -> None:
    for name, scale in scales:
        index = None if scale is None else _first(~((scale >= 0) & (scale < torch.inf)))
        if scale is not None and index is not None:
            raise ProblemError(f"{name}{list(index)} is {float(scale[index])}: pass finite scales from 0")


def check_pages(problem: Problem, table: Tensor, lengths: Tensor, pages: int) -> None:
    """Checks lengths against a block table, and the entries that hold keys. Others are never read.

    `table` has the pages of each sequence, int32 [batch, max_pages]. `lengths` are the numbers of keys, int32
    [batch]. `pages` is the number of pages of the cache.
    """
    _check_lengths("kv_lengths", lengths, "a row of block_table", table.shape[1] * problem.page_size)
    starts = torch.arange(table.shape[1], device=table.device) * problem.page_size
    index = _first(((table < 0) | (table >= pages)) & (starts < lengths[:, None]))
    if index is not None:
        row, column = index
        raise ProblemError(
            f"block_table[{row}, {column}] is {_at(table, index)} and the cache has {pages} pages: pass the "
            f"pages of sequence {row}"
        )


def _check_lists(problem: Problem, counts: Tensor, indices: Tensor, full: Tensor | None) -> None:
    """Checks the lists of a block mask."""
    width, blocks = indices.shape[-1], -(-problem.seqlen_kv // problem.block_mask)
    index = _first((counts < 0) | (counts > width))
    if index is not None:
        raise ProblemError(
            f"block_mask.counts{list(index)} is {_at(counts, index)} and a list has {width} elements: pass "
            f"counts from 0 to {width}"
        )
    own = torch.arange(width, device=counts.device) < counts[..., None]
    before = torch.nn.functional.pad(indices[..., :-1], (1, 0), value=-1)
    if full is not None:
        # Blocks that are visible in full are first, in ascending order of their own.
        if (index := _first((full < 0) | (full > counts))) is not None:
            raise ProblemError(
                f"full_counts{list(index)} is {_at(full, index)}: pass at most the list's length"
            )
        before = before.masked_fill(torch.arange(width, device=full.device) == full[..., None], -1)
    index = _first(own & ((indices <= before) | (indices >= blocks)))
    if index is not None:
        raise ProblemError(
            f"block_mask.indices{list(index)} is {_at(indices, index)}: pass numbers from 0 to {blocks - 1} "
            "in ascending order"
        )


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured. Values cannot be read during a capture."""
    return PLATFORM.is_capturing(tensor.device)


def _checked(
    executor: Executor,
    request: Request,
    platform: Platform,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs,
) -> Result:
    if not platform.is_capturing(q.device):
        check_values(request, q, k, side)
    return executor(q, k, v, scale, side)


def _check_starts(name: str, starts: Tensor, tensor: str, tokens: int, longest: int) -> None:
    # Differences of int32 values may overflow.
    starts = starts.long()
    if (begin := int(starts[0])) != 0:
        raise ProblemError(f"{name}[0] is {begin}: pass 0, where the first sequence begins")
    counts = starts.diff()
    index = _first(counts < 0)
    if index is not None:
        number = index[0] + 1
        raise ProblemError(
            f"{name}[{number}] is {_at(starts, (number,))} and less than the entry before it: pass starts "
            "that never decrease"
        )
    if (end := int(starts[-1])) > tokens:
        raise ProblemError(f"{name} ends at {end} and {tensor} has {tokens} tokens: pass starts within them")
    index = _first(counts > longest)
    if index is not None:
        limit = f"max_seqlen_{tensor}"
        raise ProblemError(
            f"sequence {index[0]} has {_at(counts, index)} tokens by {name} and {limit} is at most "
            f"{longest}: pass the longest as {limit}"
        )


def _check_lengths(name: str, lengths: Tensor, tensor: str, room: int) -> None:
    index = _first((lengths < 0) | (lengths > room))
    if index is not None:
        raise ProblemError(
            f"{name}[{index[0]}] is {_at(lengths, index)} and {tensor} has room for {room} keys: pass "
            f"lengths from 0 to {room}"
        )


def _first(wrong: Tensor) -> tuple[int, ...] | None:
    """Returns the index of the first true element, or None."""
    places = wrong.nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def _at(tensor: Tensor, index: tuple[int, ...]) -> int:
    return int(tensor[index])
