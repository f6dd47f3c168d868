"""Tests of the block manager against plain lists: allocation, sharing and refusals."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashtune.core.errors import CacheFullError, UsageError
from flashtune.kv_cache.block_manager import Growth, Ledger, Run

PAGES, SIZE = 9, 4


def extend(ledger: Ledger, sequences: list[int], tokens: list[int]) -> tuple[Growth, ...]:
    growths = ledger.plan(sequences, tokens)
    ledger.commit(growths)
    return growths


def slots(ledger: Ledger, sequence: int, tokens: int) -> list[int]:
    return [run.slot + step for run in ledger.runs(sequence, tokens) for step in range(run.rows)]


class AgainstLists(RuleBasedStateMachine):
    """A pool of cells that the ledger directs writes to; every sequence must read its own tokens back."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PAGES, SIZE)
        self.cells: list[int | None] = [None] * (PAGES * SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    def add(self) -> None:
        sequence = self.ledger.add()
        assert sequence not in self.tokens
        self.tokens[sequence] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.some(data)
        self.tokens[self.ledger.fork(parent)] = list(self.tokens[parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.ledger.free(sequence)
        del self.tokens[sequence]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        self.ledger.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True))
        counts = [data.draw(st.integers(0, 3 * SIZE)) for _ in sequences]
        before = self.state()
        try:
            growths = self.ledger.plan(sequences, counts)
        except CacheFullError:
            assert self.state() == before
            return
        assert self.state() == before, "a plan changes nothing"
        for growth in growths:
            if growth.shared is not None:
                start, source = growth.fresh[0] * SIZE, growth.shared * SIZE
                self.cells[start : start + SIZE] = self.cells[source : source + SIZE]
        self.ledger.commit(growths)
        for sequence, count in zip(sequences, counts, strict=True):
            for slot in slots(self.ledger, sequence, count):
                self.cells[slot] = self.written
                self.tokens[sequence].append(self.written)
                self.written += 1

    def state(self) -> object:
        held = {
            one: (self.ledger.holding(one).length, list(self.ledger.holding(one).pages))
            for one in self.tokens
        }
        return held, self.ledger.free_pages, [self.ledger.references(page) for page in range(PAGES)]

    @invariant()
    def all_tokens_are_where_they_should_be(self) -> None:
        assert self.ledger.sequences == tuple(self.tokens)
        for sequence, tokens in self.tokens.items():
            assert self.ledger.holding(sequence).length == len(tokens)
            assert [self.cells[slot] for slot in slots(self.ledger, sequence, len(tokens))] == tokens

    @invariant()
    def references_are_counted(self) -> None:
        holders: Counter[int] = Counter()
        for sequence, tokens in self.tokens.items():
            pages = self.ledger.holding(sequence).pages
            assert len(pages) == -(-len(tokens) // SIZE), "no page without tokens"
            assert len(set(pages)) == len(pages)
            holders.update(pages)
        assert [self.ledger.references(page) for page in range(PAGES)] == [
            holders[page] for page in range(PAGES)
        ]
        assert self.ledger.free_pages + len(holders) == PAGES

    @invariant()
    def pages_are_shared_for_common_beginnings_alone(self) -> None:
        places: dict[int, set[tuple[int, int | None]]] = {}
        rows = set()
        for sequence, tokens in self.tokens.items():
            for index, page in enumerate(self.ledger.holding(sequence).pages):
                places.setdefault(page, set()).add((index, tokens[index * SIZE]))
            rows.update(slots(self.ledger, sequence, len(tokens)))
        assert all(len(found) == 1 for found in places.values())
        assert self.ledger.rows_stored == len(rows)


AgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstLists = AgainstLists.TestCase


def test_pages_are_allocated_in_order_and_reused_last_in_first_out() -> None:
    ledger = Ledger(4, 16)
    one, two = ledger.add(), ledger.add()
    extend(ledger, [one, two], [17, 16])
    assert (list(ledger.holding(one).pages), list(ledger.holding(two).pages)) == ([0, 1], [2])
    assert ledger.runs(one, 3) == [Run(14, 2), Run(16, 1)]
    ledger.free(one)
    assert ledger.free_pages == 3
    extend(ledger, [two], [1])
    assert list(ledger.holding(two).pages) == [2, 1]


def test_forks_share_full_pages_and_copy_partial_pages_on_write() -> None:
    ledger = Ledger(8, 16)
    parent = ledger.add()
    extend(ledger, [parent], [20])
    children = [ledger.fork(parent) for _ in range(2)]
    assert (ledger.free_pages, ledger.rows_stored) == (6, 20)
    growths = extend(ledger, [parent, *children], [1, 1, 1])
    # The last of those that share a page keeps it.
    assert [growth.shared for growth in growths] == [1, 1, None]
    assert [list(ledger.holding(one).pages) for one in (parent, *children)] == [[0, 2], [0, 3], [0, 1]]
    assert [ledger.references(page) for page in range(4)] == [3, 1, 1, 1]
    assert ledger.rows_stored == 16 + 3 * 5


def test_refused_operations_have_no_side_effects() -> None:
    ledger = Ledger(3, 16)
    one, two = ledger.add(), ledger.add()
    extend(ledger, [one], [20])
    with pytest.raises(
        CacheFullError, match=r"^2 pages of 16 tokens are needed and 1 of 3 are free: free or "
    ):
        ledger.plan([one, two], [13, 1])
    fork = ledger.fork(one)
    with pytest.raises(CacheFullError, match=r"^3 pages"):
        # The copy of the shared page counts, and the last to grow needs none.
        ledger.plan([one, fork, two], [1, 13, 1])
    assert (ledger.free_pages, ledger.holding(one).length, ledger.holding(two).length) == (1, 20, 0)
    extend(ledger, [one, fork], [1, 1])
    assert ledger.free_pages == 0


def test_invalid_operations_are_refused() -> None:
    ledger = Ledger(3, 16)
    one = ledger.add()
    for call in (
        lambda: ledger.plan([one, one], [1, 1]),
        lambda: ledger.plan([one], [-1]),
        lambda: ledger.plan([one], [1, 2]),
        lambda: ledger.plan([7], [1]),
        lambda: ledger.truncate(one, 1),
        lambda: ledger.truncate(one, -1),
        lambda: ledger.runs(one, 1),
        lambda: ledger.fork(7),
        lambda: Ledger(0, 16),
        lambda: Ledger(2**31, 16),
    ):
        with pytest.raises(UsageError, match=": "):
            call()
    ledger.free(one)
    with pytest.raises(UsageError, match="sequence 0 is not in this cache"):
        ledger.free(one)
    assert ledger.add() == 1, "numbers are never given twice"
