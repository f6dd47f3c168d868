"""Kinds and lists of the key blocks of tiles, and words of masks, by the prologues of `forward_hopper`."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Problem
from flashtune.templates.forward_hopper.space import HopperConfig
from tests.emulator.hardware import Array
from tests.problems.plain_masks import visible

HIDDEN, WHOLE, PARTIAL = 0, 1, 2


class Lists(NamedTuple):
    """The workspaces of the prologues, in order. Words are missing for an additive bias."""

    kinds: Array
    words: Array
    lists: Array

    @property
    def written(self) -> tuple[Array, ...]:
        """All of them, flat."""
        return tuple(array.reshape(-1) for array in self if array.size)

    @property
    def workspaces(self) -> tuple[Array, ...]:
        """The flat workspaces that the kernel takes."""
        return self.written[1:]


def block_lists(problem: Problem, config: HopperConfig, bias: Tensor) -> Lists:
    """Returns lists of a mask or bias [batches, heads, seqlen_q, seqlen_kv]. Dimensions of 1 are shared."""
    queries, keys = problem.seqlen_q, problem.seqlen_kv
    groups, rows, width = config.num_consumer_groups, config.rows_per_group, config.block_n
    tiles, blocks = -(-queries // (groups * rows)), -(-keys // width)
    tables = bias.shape[0] * bias.shape[1] * tiles
    by_position = visible(problem, queries, keys).numpy()
    lists = np.full((tables, groups + 1, blocks + 3), -1, np.int32)
    is_mask = problem.bias is Bias.BOOLEAN
    words = np.full((tables, groups, blocks, rows, 4) if is_mask else 0, -1, np.int32)
    all_kinds = np.zeros((tables, groups, blocks), np.int32)
    for table in range(tables):
        values = bias.reshape(-1, *bias.shape[2:])[table // tiles].expand(queries, keys).numpy()
        seen = by_position & (values if is_mask else values != -np.inf)
        bare = seen if is_mask else ~by_position | (values == 0)
        kinds = all_kinds[table]
        for group in range(groups):
            first = (table % tiles * groups + group) * rows
            for block in range(blocks):
                tile = slice(first, first + rows), slice(block * width, (block + 1) * width)
                short = block * width + width > keys and is_mask
                whole = bare[tile].all() and not short
                kinds[group, block] = (WHOLE if whole else PARTIAL) if seen[tile].any() else HIDDEN
                if is_mask and kinds[group, block] != WHOLE:
                    words[table, group, block] = packed(seen[tile], rows, width)
        _write(lists[table], kinds, config.num_stages - 1)
    return Lists(all_kinds, words, lists)


def lists_of_blocks(problem: Problem, config: HopperConfig, side: ExtraInputs) -> tuple[Array, ...]:
    """Returns the workspaces for a block mask: its lists, and the counter of tiles if there is one."""
    assert side.block_counts is not None
    assert side.block_indices is not None
    counts, indices = side.block_counts, side.block_indices
    groups = config.num_consumer_groups
    rows, width, size = config.rows_per_group // config.pack_gqa, config.block_n, problem.block_mask
    has_shared_list = size % (groups * rows) == 0
    parts = 1 if has_shared_list else groups
    queries, keys = problem.seqlen_q, problem.seqlen_kv
    batches, heads = (1 if not counts.stride(axis) else counts.shape[axis] for axis in (0, 1))
    batches = problem.batch if problem.kv_lengths else batches
    tiles, blocks = -(-queries // (groups * rows)), -(-keys // width)
    longest = min(blocks, parts * size // width * indices.shape[3])
    lists = np.full((batches, heads, tiles, 1 if has_shared_list else groups + 1, longest + 3), -1, np.int32)
    for batch, head, tile in np.ndindex(batches, heads, tiles):
        own_keys = keys if side.seqlens_kv is None else int(side.seqlens_kv[batch])
        near = visible(problem, queries, own_keys).numpy()
        kinds = np.zeros((parts, blocks), int)
        for group in range(parts):
            first = (tile * groups + group) * rows
            row = first // size
            count = int(counts[batch, head, row]) if first < queries else 0
            for block in (
                int(index) for index in indices[batch, head, min(row, counts.shape[2] - 1), :count]
            ):
                for start in range(block * size, min((block + 1) * size, own_keys), width):
                    rows_of = slice(first, first + (groups * rows if has_shared_list else rows))
                    kinds[group, start // width] = WHOLE * near[rows_of, start : start + width].any()
        if has_shared_list:
            listed = [block for block in reversed(range(blocks)) if kinds[0, block]]
            entries = [block * 16 for block in listed] or [1]
            if side.full_counts is not None:
                # The first blocks of the mask's list, without effect of its function, are the last ones here.
                query_block = tile * groups * rows // size
                of_mask = indices[batch, head, query_block].tolist()
                full = set(of_mask[: side.full_counts[batch, head, query_block]])
                in_order = [
                    part
                    for block in of_mask
                    for part in range(block * size // width, (block + 1) * size // width)
                    if kinds[0, part : part + 1].any()
                ]
                entries = [part * 16 + 2 * (part * width // size not in full) for part in reversed(in_order)]
                entries = entries or [1]
            lists[batch, head, tile, 0, [0, *range(3, 3 + len(entries))]] = [len(entries), *entries]
        else:
            _write(lists[batch, head, tile], kinds, config.num_stages - 1)
            of_producer = lists[batch, head, tile, 0, 3:]
            of_producer[of_producer >= 0] &= -16
    counter = (np.zeros(1, np.int32),) if config.dynamic_schedule else ()
    return lists.reshape(-1), *counter


def packed(seen: Array, rows: int, width: int) -> Array:
    """Returns four words a row. A word has two of each eight keys, the first ones in the lowest bits."""
    full = np.zeros((rows, width), np.int64)
    full[: seen.shape[0], : seen.shape[1]] = seen
    bits = full.reshape(rows, -1, 4, 2).transpose(0, 2, 1, 3).reshape(rows, 4, -1)
    words: Array = (bits << np.arange(bits.shape[2])).sum(2).astype(np.uint32).view(np.int32)
    return words


def _write(lists: Array, kinds: Array, most: int) -> None:
    """Writes the lists of one tile."""
    listed = [block for block in reversed(range(kinds.shape[1])) if kinds[:, block].any()] or [0]
    flags = dict.fromkeys(listed, 0)
    for group, of_group in enumerate(kinds):
        taken: list[int] = []
        passed, lead = 0, 0
        for block in listed:
            if of_group[block] == HIDDEN and (not taken or passed < most):
                passed += 1
                continue
            lead = lead if taken else passed
            partial = int(of_group[block] != WHOLE)
            taken.append(block * 16 + (2 * passed if taken else 0) + partial)
            flags[block] |= partial << group
            passed = 0
        if not taken:
            taken, lead, passed = [listed[-1] * 16 + 1], len(listed) - 1, 0
            flags[listed[-1]] |= 1 << group
        lists[group + 1, : 3 + len(taken)] = [len(taken), lead, passed, *taken]
    lists[0, 0] = len(listed)
    lists[0, 3 : 3 + len(listed)] = [block * 16 + flags[block] for block in listed]
