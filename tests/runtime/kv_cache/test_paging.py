"""Tests of the block manager: allocation, sharing and refusals."""

import pytest

from flashtune.core.errors import CacheFullError, UsageError
from flashtune.kv_cache.block_manager import Growth, Ledger, Run


def extend(ledger: Ledger, sequences: list[int], tokens: list[int]) -> tuple[Growth, ...]:
    growths = ledger.plan(sequences, tokens)
    ledger.commit(growths)
    return growths


def test_pages_are_allocated_in_order_and_reused_last_in_first_out() -> None:
    ledger = Ledger(4, 16)
    first, second = ledger.add(), ledger.add()
    extend(ledger, [first, second], [17, 16])
    assert (list(ledger.holding(first).pages), list(ledger.holding(second).pages)) == ([0, 1], [2])
    assert ledger.runs(first, 3) == [Run(14, 2), Run(16, 1)]
    ledger.free(first)
    assert ledger.free_pages == 3
    extend(ledger, [second], [1])
    assert list(ledger.holding(second).pages) == [2, 1]


def test_forks_share_full_pages_and_copy_partial_pages_on_write() -> None:
    ledger = Ledger(8, 16)
    parent = ledger.add()
    extend(ledger, [parent], [20])
    children = [ledger.fork(parent) for _ in range(2)]
    assert (ledger.free_pages, ledger.rows_stored) == (6, 20)
    growths = extend(ledger, [parent, *children], [1, 1, 1])
    # The last of those that share a page keeps it.
    assert [growth.shared for growth in growths] == [1, 1, None]
    assert [list(ledger.holding(sequence).pages) for sequence in (parent, *children)] == [
        [0, 2],
        [0, 3],
        [0, 1],
    ]
    assert [ledger.references(page) for page in range(4)] == [3, 1, 1, 1]
    assert ledger.rows_stored == 16 + 3 * 5


def test_refused_operations_have_no_side_effects() -> None:
    ledger = Ledger(3, 16)
    first, second = ledger.add(), ledger.add()
    extend(ledger, [first], [20])
    with pytest.raises(
        CacheFullError, match=r"^2 pages of 16 tokens are needed and 1 of 3 are free: free or "
    ):
        ledger.plan([first, second], [13, 1])
    fork = ledger.fork(first)
    with pytest.raises(CacheFullError, match=r"^3 pages"):
        # The copy of the shared page counts, and the last to grow needs none.
        ledger.plan([first, fork, second], [1, 13, 1])
    assert (ledger.free_pages, ledger.holding(first).length, ledger.holding(second).length) == (1, 20, 0)
    extend(ledger, [first, fork], [1, 1])
    assert ledger.free_pages == 0


def test_invalid_operations_are_refused() -> None:
    ledger = Ledger(3, 16)
    sequence = ledger.add()
    for call in (
        lambda: ledger.plan([sequence, sequence], [1, 1]),
        lambda: ledger.plan([sequence], [-1]),
        lambda: ledger.plan([sequence], [1, 2]),
        lambda: ledger.plan([7], [1]),
        lambda: ledger.truncate(sequence, 1),
        lambda: ledger.truncate(sequence, -1),
        lambda: ledger.runs(sequence, 1),
        lambda: ledger.fork(7),
        lambda: Ledger(0, 16),
        lambda: Ledger(2**31, 16),
    ):
        with pytest.raises(UsageError, match=": "):
            call()
    ledger.free(sequence)
    with pytest.raises(UsageError, match="sequence 0 is not in this cache"):
        ledger.free(sequence)
    assert ledger.add() == 1, "numbers are never given twice"
