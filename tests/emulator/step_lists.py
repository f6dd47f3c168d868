"""Steps of the key blocks of a block mask, by the prologue of `backward_hopper`."""

import itertools

import numpy as np

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import BlockLists, Causal, Problem
from flashtune.templates.backward_hopper.space import (
    ROWS,
    HopperBackwardConfig,
    has_own_steps,
    may_rotate,
)
from tests.emulator.hardware import Array

FLAG_BITS = 6
VISIBLE, IN_FULL = 1, 2


def kinds_of_blocks(problem: Problem, side: ExtraInputs) -> Array:
    """Whether blocks of each query head are hidden (0), visible (1), or visible in full (3)."""
    assert side.block_counts is not None
    assert side.block_indices is not None
    rows, columns = (-(-length // problem.block_mask) for length in (problem.seqlen_q, problem.seqlen_kv))
    kinds = np.zeros((problem.batch, problem.heads, rows, columns), np.int32)
    lists_of_heads = problem.kv_heads if problem.block_lists is BlockLists.GROUP else problem.heads
    for batch, head, row in np.ndindex(kinds.shape[:3]):
        at = batch, head * lists_of_heads // problem.heads, row
        count = int(side.block_counts[at])
        full = count if side.full_counts is None else int(side.full_counts[at])
        numbers = side.block_indices[at].tolist()[:count]
        kinds[batch, head, row, numbers[:full]] = VISIBLE | IN_FULL
        kinds[batch, head, row, numbers[full:]] = VISIBLE
    return kinds


def steps_of_blocks(problem: Problem, config: HopperBackwardConfig, side: ExtraInputs) -> Array:
    """The workspace of steps, int32 [batch * kv_heads, blocks, 1 + steps]; -1 is not written."""
    kinds, size = kinds_of_blocks(problem, side), problem.block_mask
    # Groups have lists of their own, or those of a program have one.
    lists = config.block_n // ROWS if has_own_steps(problem) else 1
    columns, parts = config.block_n // lists, min(size, config.block_m)
    tiles, blocks = -(-problem.seqlen_q // config.block_m), lists * -(-problem.seqlen_kv // config.block_n)
    diagonal = problem.seqlen_kv - problem.seqlen_q if problem.causal is Causal.BOTTOM_RIGHT else 0
    is_causal = problem.causal is not Causal.NONE
    rotates = config.stagger_start and may_rotate(problem)
    group = problem.group_size
    steps = np.full((problem.batch * problem.kv_heads, blocks, 1 + group * tiles), -1, np.int32)
    for table, block in np.ndindex(steps.shape[:2]):
        batch, kv_head = divmod(table, problem.kv_heads)
        key, entries = block * columns, []
        for member, turn in itertools.product(range(group), range(tiles)):
            tile = (turn + block) % tiles if rotates else turn
            if is_causal and tile < (key - diagonal) // config.block_m:
                continue
            own = kinds[batch, kv_head * group + member]
            first = range(tile * config.block_m, (tile + 1) * config.block_m, parts)
            rows = [row // size for row in first if row < problem.seqlen_q]
            seen = own[rows, key // size] if key < problem.seqlen_kv else []
            flags = sum(int(part) << 2 * place for place, part in enumerate(seen))
            if not flags:
                continue
            for number in range(columns // ROWS):
                end = key + (number + 1) * ROWS
                is_cut = end > problem.seqlen_kv or (is_causal and end - 1 > tile * config.block_m + diagonal)
                flags += is_cut << FLAG_BITS - 2 + number
            entries.append((member * tiles + tile << FLAG_BITS) + flags)
        entries = entries or [0]
        steps[table, block, : 1 + len(entries)] = [len(entries), *entries]
    return steps
