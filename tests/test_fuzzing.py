"""Tests of the number of fuzzed cases."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(("size", "expected"), [(None, 3), ("small", 3), ("large", 500)])
def test_fuzz_count_is_chosen_by_the_environment(
    size: str | None,
    expected: int,
    fuzz_count: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if size is None:
        monkeypatch.delenv("FLASHTUNE_FUZZ", raising=False)
    else:
        monkeypatch.setenv("FLASHTUNE_FUZZ", size)

    assert fuzz_count(3, 500) == expected


def test_fuzz_count_refuses_an_unknown_size(
    fuzz_count: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_FUZZ", "huge")

    with pytest.raises(ValueError, match="FLASHTUNE_FUZZ is 'huge': set it to small or large"):
        fuzz_count(3, 500)
