"""Tests of the caches of a process."""

from __future__ import annotations

from flashtune.core.caches import ProcessCaches, keep


def test_a_full_cache_is_cleared_whole() -> None:
    cache: dict[int, int] = {}
    for number in range(3):
        keep(cache, number, number, limit=3)
    assert len(cache) == 3
    keep(cache, 3, 3, limit=3)
    assert cache == {3: 3}


def test_a_reset_clears_caches_and_results() -> None:
    caches = ProcessCaches()
    verdicts = caches.cache()
    counts: list[str] = []
    compute = caches.computed_once(counts.append)
    verdicts["key"] = True
    for _ in range(2):
        compute("records")
    assert counts == ["records"]
    caches.reset()
    compute("records")
    assert len(verdicts) == 0
    assert counts == ["records", "records"]
