"""A test of caches with a limit."""

from flashtune.core.caches import keep


def test_a_full_cache_is_cleared_whole() -> None:
    cache: dict[int, int] = {}
    for number in range(3):
        keep(cache, number, number, limit=3)
    assert len(cache) == 3
    keep(cache, 3, 3, limit=3)
    assert cache == {3: 3}
