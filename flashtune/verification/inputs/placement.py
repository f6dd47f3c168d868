"""Where tokens lie: side by side, packed one sequence behind the other, or in pages.

Values are made for sequences that lie side by side, [batch, heads, seqlen, width], each as long as the
longest. Here they are put where a kernel looks for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.inputs.guarded_tensors import BITS
from flashtune.verification.lengths import Lengths

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem

# Pages that no sequence uses, beside a quarter as many as those that are used.
SPARE_PAGES = 3
# What no kernel can look up without a fault.
FAULTY_ENTRIES = (2**31 - 1, -(2**31))
# An error that lets any number pass.
ANYTHING = 1e300


class Places(NamedTuple):
    """Where tokens lie, [tokens] each in int64.

    Attributes:
        sequence: The token's sequence.
        row: Its row there.
        block: First index of it in memory: the sequence, 0 of packed ones, or the page.
        slot: Third index there: the row, the row of all, or the row of the page.
    """

    sequence: Tensor
    row: Tensor
    block: Tensor
    slot: Tensor

    def to(self, device: torch.device) -> Places:
        """The same on a device."""
        return Places(*torch.stack(self).to(device).unbind())


class Table(NamedTuple):
    """Which pages hold the keys of each sequence.

    Attributes:
        entries: Int32 [batch, pages of the longest], on the CPU.
        pages: Pages of the pool.
    """

    entries: Tensor
    pages: int


def starts(lengths: Sequence[int]) -> Tensor:
    """Where packed sequences begin, and the last ends: int32 [sequences + 1], on the CPU."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def capacities(problem: Problem, lengths: Lengths) -> tuple[int, ...]:
    """Rows that each sequence's packed keys have: a few more where another tensor says how many are used."""
    if not (problem.packed and problem.lengths):
        return lengths.keys
    return tuple(keys + index % 3 for index, keys in enumerate(lengths.keys))


def make_table(
    problem: Problem, lengths: Lengths, generator: torch.Generator, beyond: Sequence[int] = (0,)
) -> Table:
    """Shuffled pages for all keys, out of a pool with more pages than that.

    Args:
        problem: The page's size and the longest sequence.
        lengths: Of each sequence.
        generator: Of the CPU's.
        beyond: What entries behind a sequence's pages hold, in turn.
    """
    size = problem.page_size
    counts = [-(-keys // size) for keys in lengths.keys]
    used = sum(counts)
    pages = used + used // 4 + SPARE_PAGES
    # Page 0 is nobody's: what is masked without care is masked to it.
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
    """Numbers for entries that no kernel may look up.

    Each is of a page of poison: the one before the pool, the one behind it, and one that nobody uses.
    """
    pages = table.pages
    free = sorted(set(range(pages)) - set(table.entries.flatten().tolist()))
    return -1, pages, free[0] if free else pages


def query_places(problem: Problem, lengths: Lengths) -> Places:
    """Where queries lie, and the rows of outputs."""
    sequence, row = _tokens(lengths.queries)
    if not problem.packed:
        return Places(sequence, row, sequence, row)
    return Places(sequence, row, torch.zeros_like(row), torch.arange(len(row)))


def key_places(problem: Problem, lengths: Lengths, entries: Tensor | None) -> Places:
    """Where keys and values lie; `entries` is the block table on the CPU, where there is one."""
    sequence, row = _tokens(lengths.keys)
    if entries is not None:
        page = entries[sequence, row // problem.page_size].to(torch.int64)
        return Places(sequence, row, page, row % problem.page_size)
    if not problem.packed:
        return Places(sequence, row, sequence, row)
    first = starts(capacities(problem, lengths)).to(torch.int64)
    return Places(sequence, row, torch.zeros_like(row), first[sequence] + row)


def _tokens(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sequence and row of each token."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    sequence = torch.arange(len(counts)).repeat_interleave(counts)
    return sequence, torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]


def put(memory: Tensor, dense: Tensor, places: Places) -> None:
    """Writes the rows of sequences to where they lie.

    Args:
        memory: [blocks, heads, slots, width].
        dense: [batch, heads, rows, width] of the same type.
        places: Of each row that there is.
    """
    there = places.to(memory.device)
    _rows(memory)[there.block, there.slot] = _rows(dense)[there.sequence, there.row]


def _rows(tensor: Tensor) -> Tensor:
    """[first, rows, heads, width], as integers: torch moves no 8-bit floats about."""
    return tensor.view(BITS[tensor.element_size()]).transpose(1, 2)


def pick(memory: Tensor, problem: Problem, lengths: Lengths, heads: Tensor, rows: Tensor) -> Tensor:
    """Some rows of some heads of an output or a log-sum-exp: [heads, rows, ...].

    Args:
        memory: [batch, heads, rows, ...], of packed sequences [1, heads, rows of all, ...].
        problem: Whether sequences are packed.
        lengths: Of each sequence.
        heads: Each `sequence · heads of a sequence + head`.
        rows: Of a sequence; what a shorter one does not have is some other row.
    """
    batch, head = heads // problem.heads, heads % problem.heads
    if not problem.packed:
        # No row need be looked up where all are wanted.
        return memory.flatten(0, 1) if is_all(problem, heads, rows) else memory[batch, head][:, rows]
    first = starts(lengths.queries).to(torch.int64)[batch][:, None]
    return memory[0][head[:, None], (first + rows).clamp_max(max(0, lengths.total_q - 1))]


def is_all(problem: Problem, heads: Tensor, rows: Tensor) -> bool:
    """Whether these are all heads of all sequences and all rows of the longest, in their order."""
    every_head = torch.arange(problem.batch * problem.heads)
    return torch.equal(heads, every_head) and are_all_rows(problem, rows)


def are_all_rows(problem: Problem, rows: Tensor) -> bool:
    """Whether these are all rows of the longest sequence, in their order."""
    return torch.equal(rows, torch.arange(problem.seqlen_q))


def missing(problem: Problem, lengths: Lengths, heads: Tensor, rows: Tensor) -> Tensor | None:
    """Which of such rows a sequence does not have, [heads, rows]; None where all have all."""
    if not problem.packed:
        return None
    return rows >= torch.tensor(lengths.queries)[heads // problem.heads][:, None]


def excused(allowed: Tensor, absent: Tensor | None) -> Tensor:
    """What errors are allowed; any where a sequence has no row, since some other row is compared there.

    Args:
        allowed: In float64, on any device.
        absent: Boolean, of the same shape, on the CPU; None where all rows are there.
    """
    return allowed if absent is None else allowed + (ANYTHING * absent.double()).to(allowed.device)
