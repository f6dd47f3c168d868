"""Positions of tokens in memory: padded, varlen or in pages.

Values are made in padded form, [batch, heads, seqlen, width]. This module copies them to the kernel's memory
layout, and results back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Problem
from flashtune.verification.inputs.guarded_tensors import BITS
from flashtune.verification.lengths import Lengths

# Unused pages, in addition to a quarter of the number of used pages.
SPARE_PAGES = 3
# Page numbers that fault when a kernel uses them.
FAULTY_ENTRIES = (2**31 - 1, -(2**31))
# A tolerance that accepts any number.
ANYTHING = 1e300


class Places(NamedTuple):
    """Positions of tokens, [tokens] each in int64."""

    sequence: Tensor  # The token's sequence.
    row: Tensor  # Its row in the sequence.
    block: Tensor  # Its first index in memory: the sequence, 0 in a varlen batch, or the page.
    # Its third index in memory: the row in the sequence, in the varlen batch, or in the page.
    slot: Tensor

    def to(self, device: torch.device) -> Places:
        """Returns the positions on a device."""
        return Places(*torch.stack(self).to(device).unbind())


class Table(NamedTuple):
    """A block table: the pages of each sequence."""

    entries: Tensor  # Int32 [batch, pages of the longest sequence], on the CPU.
    pages: int  # Number of pages of the cache.


def starts(lengths: Sequence[int]) -> Tensor:
    """Returns the cumulative lengths of varlen sequences, from 0: int32 [sequences + 1], on the CPU."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def capacities(problem: Problem, lengths: Lengths) -> tuple[int, ...]:
    """Returns the rows of each sequence's keys: more than it uses in a varlen batch with `seqlens_kv`."""
    if not (problem.packed and problem.kv_lengths):
        return lengths.keys
    return tuple(keys + index % 3 for index, keys in enumerate(lengths.keys))


def make_table(
    problem: Problem, lengths: Lengths, generator: torch.Generator, beyond: Sequence[int] = (0,)
) -> Table:
    """Returns a block table of random pages of a cache that has some unused pages.

    The entries after a sequence's pages get the numbers of `beyond` in turn.
    """
    size = problem.page_size
    counts = [-(-keys // size) for keys in lengths.keys]
    used = sum(counts)
    pages = used + used // 4 + SPARE_PAGES
    # No sequence has page 0, because careless masking of page numbers gives 0.
    shuffled = 1 + torch.randperm(pages - 1, generator=generator).to(torch.int32)
    width = -(-problem.seqlen_kv // size)
    entries = torch.tensor(list(itertools.islice(itertools.cycle(beyond), len(counts) * width)))
    entries = entries.to(torch.int32).reshape(len(counts), width)
    for sequence, (start, count) in enumerate(
        zip(itertools.accumulate(counts, initial=0), counts, strict=False)
    ):
        entries[sequence, :count] = shuffled[start : start + count]
    return Table(entries, pages)


def unused_entries(table: Table) -> tuple[int, ...]:
    """Returns page numbers for unused entries of a block table.

    Each refers to a page of poison: the one before the cache, the one after it, and an unused one.
    """
    pages = table.pages
    free = sorted(set(range(pages)) - set(table.entries.flatten().tolist()))
    return -1, pages, free[0] if free else pages


def key_shape(
    problem: Problem, lengths: Lengths, table: Table | None, *, spare: int = 0
) -> tuple[int, int, int]:
    """Returns the shape of keys without the head dim. A cache in pages has `spare` more pages."""
    if table is not None:
        return table.pages + spare, problem.kv_heads, problem.page_size
    if problem.packed:
        return 1, problem.kv_heads, max(1, sum(capacities(problem, lengths)))
    return problem.batch, problem.kv_heads, problem.seqlen_kv


def sequence_inputs(problem: Problem, lengths: Lengths, table: Table | None) -> dict[str, Tensor]:
    """Returns the lengths and the block table as kernels take them, by name; int32 on the CPU."""
    inputs: dict[str, Tensor] = {}
    if problem.packed:
        inputs["cu_seqlens_q"] = starts(lengths.queries)
        if table is None:
            inputs["cu_seqlens_kv"] = starts(capacities(problem, lengths))
    if table is not None or problem.kv_lengths:
        inputs["seqlens_kv"] = torch.tensor(lengths.keys, dtype=torch.int32)
    if table is not None:
        inputs["block_table"] = table.entries
    return inputs


def query_places(problem: Problem, lengths: Lengths) -> Places:
    """Returns the positions of queries and of output rows."""
    sequence, row = _tokens(lengths.queries)
    if not problem.packed:
        return Places(sequence, row, sequence, row)
    return Places(sequence, row, torch.zeros_like(row), torch.arange(len(row)))


def key_places(
    problem: Problem, lengths: Lengths, entries: Tensor | None, first: Tensor | None = None
) -> Places:
    """Returns the positions of keys and values.

    `entries` is the block table on the CPU, if any. `first` has the first row of each sequence of a varlen
    batch, on the CPU. By default it follows from `capacities`.
    """
    sequence, row = _tokens(lengths.keys)
    if entries is not None:
        page = entries[sequence, row // problem.page_size].to(torch.int64)
        return Places(sequence, row, page, row % problem.page_size)
    if not problem.packed:
        return Places(sequence, row, sequence, row)
    first = starts(capacities(problem, lengths)) if first is None else first
    return Places(sequence, row, torch.zeros_like(row), first.to(torch.int64)[sequence] + row)


def _tokens(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the sequence and the row of each token."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    sequence = torch.arange(len(counts)).repeat_interleave(counts)
    return sequence, torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]


def put(memory: Tensor, dense: Tensor, places: Places) -> None:
    """Copies the rows of sequences to their positions.

    `memory` is [blocks, heads, slots, width], and `dense` [batch, heads, rows, width] of the same dtype.
    """
    there = places.to(memory.device)
    _rows(memory)[there.block, there.slot] = _rows(dense)[there.sequence, there.row]


class SequenceLayout(NamedTuple):
    """The positions of a problem's sequences in memory."""

    problem: Problem
    lengths: Lengths
    queries_at: Places | None  # None if tensors are padded already.
    keys_at: Places | None  # None if tensors are padded already.

    def queries(self, memory: Tensor) -> Tensor:
        """Returns rows of queries with zeros after each sequence, [batch, heads, seqlen_q, width]."""
        return self._padded(memory, self.queries_at, self.problem.seqlen_q)

    def keys(self, memory: Tensor) -> Tensor:
        """Returns rows of keys with zeros after each sequence, [batch, kv_heads, seqlen_kv, width]."""
        return self._padded(memory, self.keys_at, self.problem.seqlen_kv)

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs
    ) -> tuple[Tensor, Tensor, Tensor, ExtraInputs]:
        """Returns padded q, k and v, and the extra inputs with a scale for each key of a cache in pages."""
        if self.problem.page_size:
            side = side._replace(k_scale=self._of_keys(side.k_scale), v_scale=self._of_keys(side.v_scale))
        return self.queries(q), self.keys(k), self.keys(v), side

    def _of_keys(self, scale: Tensor | None) -> Tensor | None:
        """Returns the scale of each key, [batch, kv_heads, seqlen_kv], of [pages, kv_heads]."""
        if scale is None:
            return None
        of_slots = scale[:, :, None, None].expand(-1, -1, self.problem.page_size, 1)
        return self.keys(of_slots)[..., 0]

    def _padded(self, memory: Tensor, places: Places | None, rows: int) -> Tensor:
        """Returns rows of sequences, [batch, heads, rows, width], of [blocks, heads, slots, width]."""
        if places is None:
            return memory
        there = places.to(memory.device)
        dense = memory.new_zeros(self.problem.batch, memory.shape[1], rows, memory.shape[3])
        _rows(dense)[there.sequence, there.row] = _rows(memory)[there.block, there.slot]
        return dense


def _rows(tensor: Tensor) -> Tensor:
    """Returns a view [first, rows, heads, width] as integers, because torch cannot index 8-bit floats."""
    return tensor.view(BITS[tensor.element_size()]).transpose(1, 2)


def pick(memory: Tensor, problem: Problem, lengths: Lengths, heads: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows of some heads of an output or a log-sum-exp: [heads, rows, ...].

    `memory` is [batch, heads, rows, ...], or [1, heads, total_q, ...] of a varlen batch. Each head is
    `sequence · heads of a sequence + head`. Rows that a shorter sequence does not have are replaced by other
    rows.
    """
    batch, head = heads // problem.heads, heads % problem.heads
    if not problem.packed:
        # All rows are returned without indexing.
        return memory.flatten(0, 1) if is_all(problem, heads, rows) else memory[batch, head][:, rows]
    first = starts(lengths.queries).to(torch.int64)[batch][:, None]
    return memory[0][head[:, None], (first + rows).clamp_max(max(0, lengths.total_q - 1))]


def is_all(problem: Problem, heads: Tensor, rows: Tensor) -> bool:
    """Returns whether these are all heads of all sequences and all rows of the longest, in order."""
    every_head = torch.arange(problem.batch * problem.heads)
    return torch.equal(heads, every_head) and are_all_rows(problem, rows)


def are_all_rows(problem: Problem, rows: Tensor) -> bool:
    """Returns whether these are all rows of the longest sequence, in order."""
    return torch.equal(rows, torch.arange(problem.seqlen_q))


def missing(problem: Problem, lengths: Lengths, heads: Tensor, rows: Tensor) -> Tensor | None:
    """Returns which rows a sequence does not have, [heads, rows], or None unless the batch is varlen."""
    if not problem.packed:
        return None
    return rows >= torch.tensor(lengths.queries)[heads // problem.heads][:, None]


def excused(allowed: Tensor, absent: Tensor | None) -> Tensor:
    """Returns tolerances that accept anything for absent rows, in whose place other rows are compared.

    `allowed` is in float64, on any device. `absent` is a boolean of the same shape on the CPU, or None if no
    rows are absent.
    """
    return allowed if absent is None else allowed + (ANYTHING * absent.double()).to(allowed.device)


def aside(generator: torch.Generator, step: int = 0) -> torch.Generator:
    """Returns a generator on the CPU with the seed of another generator plus `step`.

    There, arithmetic with small tensors loads no CUDA kernels.
    """
    return torch.Generator().manual_seed((generator.initial_seed() + step) % 2**32)
