"""Who holds which page of a cache: free pages, reference counts and the block table of each sequence.

Sequences grow by whole pages, which lie anywhere, and sequences that share a beginning share its pages
(Kwon et al., 2023). There is no tensor here: a page is a number.
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
    """What one sequence holds.

    Attributes:
        length: Its tokens.
        pages: As many pages as these need, in order; the rows behind the last token are free.
    """

    length: int
    pages: array[int]


class Growth(NamedTuple):
    """How one sequence will grow.

    Attributes:
        sequence: Its number.
        length: Its tokens afterwards.
        shared: Its last page where others hold it too and rows of it are to be written: it is left to
            them, and the first of `fresh` takes its place as a copy.
        fresh: The pages that it takes.
    """

    sequence: int
    length: int
    shared: int | None
    fresh: tuple[int, ...]


class Run(NamedTuple):
    """Rows of one page that lie behind one another.

    Attributes:
        slot: The first of them: page · page_size + row.
        rows: How many.
    """

    slot: int
    rows: int


class Ledger:
    """Which pages are free, and which sequences hold the others."""

    def __init__(self, pages: int, page_size: int) -> None:
        """A ledger of free pages alone.

        Raises:
            UsageError: There is no page, or there are more than block tables can number.
        """
        self.pages = pages = read_count("pages", pages, f"a number of pages from 1 to {MOST}", 1, MOST)
        self.page_size = page_size
        # The page that was freed last is taken first, and a new ledger hands them out in order.
        self._free = array("i", range(pages - 1, -1, -1))
        self._references = array("i", bytes(4 * pages))
        self._holdings: dict[int, Holding] = {}
        self._numbers = count()

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The live sequences, oldest first."""
        return tuple(self._holdings)

    @property
    def rows_stored(self) -> int:
        """Rows that hold a token of at least one sequence: those of shared pages count once."""
        filled: dict[int, int] = {}
        for held in self._holdings.values():
            for page in held.pages[:-1]:
                filled[page] = self.page_size
            if held.pages:
                rows = held.length - (len(held.pages) - 1) * self.page_size
                filled[held.pages[-1]] = max(filled.get(held.pages[-1], 0), rows)
        return sum(filled.values())

    def references(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._references[page]

    def holding(self, sequence: int) -> Holding:
        """What a live sequence holds.

        Raises:
            UsageError: There is no such sequence.
        """
        try:
            return self._holdings[sequence]
        except (KeyError, TypeError):
            raise UsageError(
                f"sequence {shown(sequence)} is not in this cache: add it, or was it freed?"
            ) from None

    def add(self) -> int:
        """A new sequence, without tokens. Numbers are never given twice."""
        return self._enter(Holding(0, array("i")))

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens, in the same pages."""
        length, pages = self.holding(sequence)
        for page in pages:
            self._references[page] += 1
        return self._enter(Holding(length, pages[:]))

    def free(self, sequence: int) -> None:
        """Ends a sequence; pages that nobody else holds are free at once."""
        self._release(self.holding(sequence).pages)
        del self._holdings[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens of a sequence but the first `length`.

        Raises:
            UsageError: The sequence is shorter, or there is no such sequence.
        """
        held = self.holding(sequence)
        what = f"how many of the {held.length} tokens of sequence {sequence} to keep"
        length = read_count("length", length, what, 0, held.length)
        kept = self._pages_for(length)
        self._release(held.pages[kept:])
        self._holdings[sequence] = Holding(length, held.pages[:kept])

    def plan(self, sequences: Sequence[int], tokens: Sequence[int]) -> tuple[Growth, ...]:
        """What it takes to make room for more tokens; nothing is changed yet.

        Args:
            sequences: Live sequences, none of them twice.
            tokens: How many tokens each will have more.

        Raises:
            CacheFullError: There are too few free pages for all of them.
            UsageError: The arguments do not fit.
        """
        check_counts(sequences, tokens)
        left: Counter[int] = Counter()
        needs: list[tuple[int, int, int | None, int]] = []
        for sequence, more in zip(sequences, tokens, strict=True):
            length, pages = self.holding(sequence)
            shared = None
            # Of sequences that share a page and grow together, the last keeps it.
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
        """Does what was planned last; in between nothing may have changed."""
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
        """Where the last tokens of a sequence lie, in order, one run a page.

        Raises:
            UsageError: The sequence has fewer, or there is no such sequence.
        """
        length, pages = self.holding(sequence)
        if not 0 <= tokens <= length:
            raise UsageError(f"sequence {sequence} has {length} tokens and not {tokens}: extend it first")
        size, found, start = self.page_size, [], length - tokens
        while start < length:
            row = start % size
            rows = min(size - row, length - start)
            found.append(Run(pages[start // size] * size + row, rows))
            start += rows
        return found

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
    """Checks that there is a count of tokens for each of some sequences.

    Raises:
        UsageError: There is not, one is negative, or a sequence is named twice.
    """
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
