"""Tests of the caches of a process."""

from flashtune.core.session import Session, keep


def test_a_full_cache_is_cleared_whole() -> None:
    cache: dict[int, int] = {}
    for number in range(3):
        keep(cache, number, number, limit=3)
    assert len(cache) == 3
    keep(cache, 3, 3, limit=3)
    assert cache == {3: 3}


def test_a_cache_has_one_name() -> None:
    session = Session()
    cache = session.cache("calls")
    assert session.cache("calls") is cache
    assert session.process_cache("calls") is not cache


def test_calls_are_forgotten_by_owner_and_results_only_by_a_reset() -> None:
    session = Session()
    own, other, verdicts = session.cache("torch: a"), session.cache("b"), session.process_cache("verdicts")
    counts: list[str] = []
    compute = session.computed_once(counts.append)
    for cache in (own, other, verdicts):
        cache["key"] = True
    session.forget("torch")
    assert (len(own), len(other)) == (0, 1)
    session.forget()
    assert (len(other), len(verdicts)) == (0, 1)
    for _ in range(2):
        compute("records")
    session.reset()
    compute("records")
    assert len(verdicts) == 0
    assert counts == ["records", "records"]
