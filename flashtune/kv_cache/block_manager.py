"""The block manager of a cache: free pages, reference counts and the block table of each sequence.

Sequences grow by whole pages at any place, and sequences with a common prefix share its pages (Kwon et al.,
2023). The module has no tensors: a page is a number.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, islice
from typing import NamedTuple

from flashtune.core.arguments import read_count, shown
from flashtune.core.errors import CacheFullError, UsageError

# Block tables and lengths are int32.
MOST = 2**31 - 1


class Holding(NamedTuple):
    """The tokens and pages of one sequence.

    Attributes:
        length: Number of tokens.
        pages: The pages for these tokens, in order. Rows after the last token are free.
    """

    length: int
    pages: array[int]


class Growth(NamedTuple):
    """The planned growth of one sequence.

    Attributes:
        length: Number of tokens after the growth.
        shared: The sequence's last page, if it is shared and rows of it are to be written. The other
            sequences keep it, and the first page of `fresh` replaces it as a copy.
        fresh: The additional pages.
    """

    sequence: int
    length: int
    shared: int | None
    fresh: tuple[int, ...]


class Run(NamedTuple):
    """Consecutive rows of one page.

    Attributes:
        slot: The slot of the first row: page · page_size + row.
    """

    slot: int
    rows: int


class Ledger:
    """The free pages, and the pages of each sequence."""

    def __init__(self, pages: int, page_size: int) -> None:
        """Creates a ledger in which all pages are free."""
        self.pages = pages = read_count("pages", pages, f"a number of pages from 1 to {MOST}", 1, MOST)
        self.page_size = page_size
        # The last freed page is used first. A new ledger uses pages in order.
        self._free = array("i", range(pages - 1, -1, -1))
        self._references = array("i", bytes(4 * pages))
        self._holdings: dict[int, Holding] = {}
        self._numbers = count()

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The live sequences, oldest first."""
        return tuple(self._holdings)

    @property
    def rows_stored(self) -> int:
        """Number of rows with a token of at least one sequence; rows of shared pages count once."""
        filled: dict[int, int] = {}
        for held in self._holdings.values():
            for page in held.pages[:-1]:
                filled[page] = self.page_size
            if held.pages:
                rows = held.length - (len(held.pages) - 1) * self.page_size
                filled[held.pages[-1]] = max(filled.get(held.pages[-1], 0), rows)
        return sum(filled.values())

    def references(self, page: int) -> int:
        """Returns the number of sequences that use a page."""
        return self._references[page]

    def holding(self, sequence: int) -> Holding:
        """Returns the tokens and pages of a live sequence."""
        try:
            return self._holdings[sequence]
        except (KeyError, TypeError):
            raise UsageError(
                f"sequence {shown(sequence)} is not in this cache: add it, or was it freed?"
            ) from None

    def add(self) -> int:
        """Returns the number of a new, empty sequence. Numbers are never reused."""
        return self._enter(Holding(0, array("i")))

    def fork(self, sequence: int) -> int:
        """Returns the number of a new sequence with the same tokens in the same pages."""
        length, pages = self.holding(sequence)
        for page in pages:
            self._references[page] += 1
        return self._enter(Holding(length, pages[:]))

    def free(self, sequence: int) -> None:
        """Removes a sequence. Pages that no other sequence uses become free at once."""
        self._release(self.holding(sequence).pages)
        del self._holdings[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Removes all tokens of a sequence after the first `length`."""
        held = self.holding(sequence)
        what = f"how many of the {held.length} tokens of sequence {sequence} to keep"
        length = read_count("length", length, what, 0, held.length)
        kept = self._pages_for(length)
        self._release(held.pages[kept:])
        self._holdings[sequence] = Holding(length, held.pages[:kept])

    def plan(self, sequences: Sequence[int], tokens: Sequence[int]) -> tuple[Growth, ...]:
        """Returns the growths that make room for more tokens. Changes nothing yet.

        Sequences are live and without duplicates.
        """
        check_counts(sequences, tokens)
        left: Counter[int] = Counter()
        needs: list[tuple[int, int, int | None, int]] = []
        for sequence, more in zip(sequences, tokens, strict=True):
            length, pages = self.holding(sequence)
            shared = None
            # If all sequences that share a page grow together, the last one keeps it.
            if more and length % self.page_size and self._references[pages[-1]] - left[pages[-1]] > 1:
                shared = pages[-1]
                left[shared] += 1
            wanted = self._pages_for(length + more) - len(pages) + (shared is not None)
            needs.append((sequence, length + more, shared, wanted))
        needed = sum(wanted for *_, wanted in needs)
        if needed > len(self._free):
            raise CacheFullError(
                f"{needed} pages of {self.page_size} tokens are needed and {len(self._free)} of {self.pages} "
                "are free: free or truncate sequences, or make a cache of more pages"
            )
        fresh = reversed(self._free)
        return tuple(Growth(*need[:3], tuple(islice(fresh, need[3]))) for need in needs)

    def commit(self, growths: Iterable[Growth]) -> None:
        """Applies the latest plan. The ledger must not have changed since."""
        taken = 0
        for sequence, length, shared, fresh in growths:
            pages = self._holdings[sequence].pages
            if shared is not None:
                self._references[shared] -= 1
                pages.pop()
            pages.extend(fresh)
            for page in fresh:
                self._references[page] = 1
            taken += len(fresh)
            self._holdings[sequence] = Holding(length, pages)
        del self._free[len(self._free) - taken :]

    def runs(self, sequence: int, tokens: int) -> list[Run]:
        """Returns the rows of the last tokens of a sequence, in order, one run per page."""
        length, pages = self.holding(sequence)
        if not 0 <= tokens <= length:
            raise UsageError(f"sequence {sequence} has {length} tokens and not {tokens}: extend it first")
        size, parts, start = self.page_size, [], length - tokens
        while start < length:
            row = start % size
            rows = min(size - row, length - start)
            parts.append(Run(pages[start // size] * size + row, rows))
            start += rows
        return parts

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _enter(self, held: Holding) -> int:
        sequence = next(self._numbers)
        self._holdings[sequence] = held
        return sequence

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)


def check_counts(sequences: Sequence[int], tokens: Sequence[int]) -> None:
    """Checks that there is one count of tokens for each sequence."""
    for number in tokens:
        if type(number) is not int or not 0 <= number <= MOST:
            read_count("a count of tokens", number, "0 or more, and truncate to take some away")
    if len(sequences) != len(tokens):
        raise UsageError(f"{len(sequences)} sequences and {len(tokens)} counts of tokens: pass one for each")
    for sequence in sequences:
        if type(sequence) is not int:
            read_count("a sequence", sequence, "its number")
    if len(set(sequences)) < len(sequences):
        raise UsageError("a sequence is named twice: pass one count for all its tokens")
