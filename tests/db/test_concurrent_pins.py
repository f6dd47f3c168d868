"""Tests of selections by several processes and threads at the same time."""

import concurrent.futures
import multiprocessing
import random

import pytest

from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.store import Store, open_store
from flashtune.templates.registry import find_family
from tests.db.records import make_problem, make_record

PROCESSES, THREADS, RECORDS = 2, 4, 15
H200 = find_target("nvidia-h200")


def make(ms: int) -> Record:
    """A record; every other one is of a family that needs aligned tensors."""
    if ms % 2:
        return make_record(float(ms))
    family, problem = find_family("forward_hopper"), make_problem()
    return make_record(float(ms), family=family.name, config=family.default(problem, H200))


def pin_all(url: str, times: list[int]) -> list[int]:
    """Stores records, selects those that are faster than the selection, and returns their times."""

    def pin(mine: list[int]) -> list[int]:
        selected = []
        for ms in mine:
            record_id = store.add(make(ms))
            if store.pin(record_id, lambda present: (present.ms or 0.0) < ms):  # noqa: B023 - called at once
                selected.append(ms)
            if ms % 2:
                store.fallback(record_id)
        return selected

    with open_store(url) as store, concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        shares = [times[start::THREADS] for start in range(THREADS)]
        return [ms for selected in threads.map(pin, shares) for ms in selected]


@pytest.mark.slow
def test_concurrent_pins_select_the_fastest_once(store: Store) -> None:
    times = random.Random(44).sample(range(100, 1000), PROCESSES * THREADS * RECORDS)
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, spawned) as processes:
        shares = [times[start::PROCESSES] for start in range(PROCESSES)]
        selected = [ms for part in processes.map(pin_all, [store.url] * PROCESSES, shares) for ms in part]
    assert len(store.records()) == len(times)
    (selection,) = store.selections()
    assert selection.record == make(min(times))
    # Each selection took the place of a slower one, and no two of one time.
    assert len(selected) == len(set(selected))
    assert min(selected) == min(times)
    fallbacks = store.fallbacks()
    assert len(fallbacks) == (not serves_any_tensors(selection.record))
    assert all(serves_any_tensors(row.record) for row in fallbacks)
