"""Tests of the comparison of host times of two checkouts."""

from benchmarks.host import compare

NAMES = (*(name for _, *pair in compare.RATIOS for name in pair), "empty_launch", "two_empty_launches")


def test_ratios_are_of_medians() -> None:
    rounds = [dict.fromkeys(NAMES, time) | {"decode": 3 * time} for time in (1.0, 9.0, 2.0)]
    old = compare._medians(rounds)
    new = old | {"decode": 3.0, "two_empty_launches": 5.0}
    assert old["decode"] == 6.0
    lines = {line[:32].strip(): line[32:].split() for line in compare._lines(old, new)}
    assert lines["decode"] == ["6.00", "3.00", "0.500"]
    assert lines["decode over SDPA"] == ["3.000", "1.500"]
    assert lines["an empty second launch (us)"] == ["0.00", "3.00"]
