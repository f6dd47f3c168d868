"""Tests of the key blocks that groups of a Hopper kernel process and skip."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.problem import Causal, Problem
from tests.emulator.hopper_schedule import COUNTS, in_python, kernel_of
from tests.problems.hopper import a_problem


@pytest.mark.slow
@given(
    st.sampled_from(list(Causal)),
    st.integers(0, 20),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(1, 700),
)
@settings(max_examples=40)
def test_blocks_have_a_visible_key(
    causal: Causal, tile: int, rows: int, groups: int, seqlen_q: int, seqlen_kv: int
) -> None:
    problem = a_problem(64, causal=causal, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    size = groups * rows
    first = tile % math.ceil(seqlen_q / size) * size

    def seen(start: int, count: int) -> int:
        """Blocks of 128 keys, by the definition; rows past the end are those of a longer sequence."""
        if causal is Causal.NONE:
            return math.ceil(seqlen_kv / 128)
        last = min(start + count + problem.diagonal, seqlen_kv)
        return max(math.ceil(last / 128), 1)

    count = COUNTS[causal]
    whole = count(first, size, seqlen_q, seqlen_kv)
    assert whole == seen(first, size)
    for group in range(groups):
        own = count(first + group * rows, rows, seqlen_q, seqlen_kv)
        assert own == seen(first + group * rows, rows)
        # The producer copies `whole` tiles for all groups; a group skips those that it does not need.
        assert 1 <= own <= whole


# ---- windows ---------------------------------------------------------------------------------------

WINDOWS = [
    (Causal.BOTTOM_RIGHT, {"window_left": 0}),
    (Causal.BOTTOM_RIGHT, {"window_left": 1024}),
    (Causal.TOP_LEFT, {"window_left": 100}),
    (Causal.NONE, {"window_left": 300}),
    (Causal.NONE, {"window_right": 70}),
    (Causal.NONE, {"window_left": 129, "window_right": 127}),
    (Causal.BOTTOM_RIGHT, {"chunk": 256}),
    (Causal.TOP_LEFT, {"chunk": 300}),
    (Causal.NONE, {"chunk": 200}),
    (Causal.NONE, {"chunk": 500, "window_left": 150, "window_right": 40}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@given(st.data())
@settings(max_examples=25)
def test_groups_process_exactly_the_visible_blocks(
    causal: Causal, window: dict[str, int], data: st.DataObject
) -> None:
    groups, rows = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 64, 128]))
    lengths = {name: data.draw(st.integers(1, 2500)) for name in ("seqlen_q", "seqlen_kv")}
    problem = msgspec.structs.replace(a_problem(64, causal=causal), **window, **lengths)
    count, skip = (
        COUNTED[causal, tuple(window.items())][name] for name in ("get_n_block_max", "get_n_block_min")
    )
    size = groups * rows
    first = data.draw(st.integers(0, (lengths["seqlen_q"] - 1) // size)) * size
    whole = count(first, size, *lengths.values())
    oldest = skip(first, whole, *lengths.values()) if skip else 0
    for group in range(groups):
        start = first + group * rows
        own = count(start, rows, *lengths.values())
        own_oldest = skip(start, own, *lengths.values()) if skip else 0
        # All groups take or pass by as many blocks as the producer copies.
        assert 0 <= oldest <= own_oldest < own <= whole
        seen = {
            block
            for query in range(start, min(start + rows, lengths["seqlen_q"]))
            for block in seen_blocks(problem, query)
        }
        assert seen <= set(range(own_oldest, own))
        if seen and start + rows <= lengths["seqlen_q"]:
            assert seen == set(range(own_oldest, own))


def counting(causal: Causal, window: dict[str, int]) -> dict[str, Any]:
    kernel = kernel_of(msgspec.structs.replace(a_problem(64, causal=causal), **window), block_n=128)
    has_left = "window_left" in window or "chunk" in window
    names = ("get_n_block_max", "get_n_block_min") if has_left else ("get_n_block_max",)
    return {"get_n_block_min": None, **{name: in_python(kernel, name) for name in names}}


COUNTED = {(causal, tuple(window.items())): counting(causal, window) for causal, window in WINDOWS}


def seen_blocks(problem: Problem, query: int) -> range:
    """Blocks of 128 keys in which a query sees some, by the definition."""
    position, left, right = query + problem.diagonal, problem.sight.left, problem.sight.right
    start = 0 if left is None else max(0, position - left)
    end = problem.seqlen_kv if right is None else min(position + right + 1, problem.seqlen_kv)
    if chunk := problem.chunk:
        start, end = max(start, position // chunk * chunk), min(end, position // chunk * chunk + chunk)
    return range(start // 128, math.ceil(end / 128)) if start < end else range(0)
