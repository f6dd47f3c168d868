"""Tests of Hopper kernels' scheduler and key blocks: every tile is processed once."""

import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.problem import Causal, Problem
from tests.emulator.hopper_schedule import COUNTS, LOCATES, Place, in_python, kernel_of
from tests.problems.hopper import a_problem


@pytest.mark.slow
@given(
    st.sampled_from(sorted(LOCATES)),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_every_tile_is_processed_once(
    kind: tuple[str, int], most_workers: int, tiles: int, batch: int, kv_heads: int, group: int, section: int
) -> None:
    order, pack = kind
    packs_per_kv = math.ceil(group / pack)
    packs = kv_heads * packs_per_kv
    total = tiles * batch * packs
    section, workers = min(section, batch * packs), min(most_workers, total)
    schedule = (total, tiles, section, batch * packs, packs, packs_per_kv)
    located = [LOCATES[kind](index, workers, *schedule) for index in range(total)]
    assert sorted(located) == [
        (tile, sequence, kv_head, head)
        for tile in range(tiles)
        for sequence in range(batch)
        for kv_head in range(kv_heads)
        for head in range(0, group, pack)
    ]
    if order != "serpentine":
        # The heads of a section are done before those of the next, tile by tile.
        ranks = [
            (
                (sequence * packs + kv_head * packs_per_kv + head // pack) // section,
                tile if order == "linear" else -tile,
            )
            for tile, sequence, kv_head, head in located
        ]
        assert ranks == sorted(ranks)


def test_serpentine_order_balances_tile_lengths() -> None:
    workers, total, tiles, heads = 8, 128, 32, 4

    def spread(order: str) -> int:
        """The difference between the largest and the smallest work of a program."""
        locate = LOCATES[order, 1]
        lengths = [locate(index, workers, total, tiles, heads, heads, heads, 1)[0] for index in range(total)]
        work = [sum(map(int, lengths[worker::workers])) for worker in range(workers)]
        return max(work) - min(work)

    assert spread("serpentine") == 0
    assert spread("lpt") > 0


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 6), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_tiles_of_chunks_are_in_order_of_their_length(
    tiles: int, most_workers: int, heads: int, section: int
) -> None:
    config = {"order": "lpt", "num_consumer_groups": 2}
    chunked = a_problem(128, causal=Causal.BOTTOM_RIGHT, chunk=1024)
    locate = in_python(kernel_of(chunked, **config), "locate")
    total, section = tiles * heads, min(section, heads)
    schedule = (total, tiles, section, heads, heads, 1)
    located = [locate(index, min(most_workers, total), *schedule) for index in range(total)]
    assert sorted(located) == [(tile, 0, head, 0) for tile in range(tiles) for head in range(heads)]
    # A chunk has eight tiles of 128 queries. Those of the last chunk come first if it is not whole.
    whole = [(head // section, -(tile % 8)) for tile, _, head, _ in located if tile < tiles // 8 * 8]
    assert whole == sorted(whole)


# ---- packed sequences ------------------------------------------------------------------------------

PACKED = a_problem(64, causal=Causal.BOTTOM_RIGHT, packed=1)
SEEKS = {
    order: kernel_of(PACKED, order=order, num_consumer_groups=3) for order in ("linear", "lpt", "serpentine")
}
SEEKING = {order: in_python(kernel, "next_tile") for order, kernel in SEEKS.items()}
ROWS_OF_A_TILE = 192
FIELDS = ("m_block", "kv_head", "head", "q_start", "seqlen_q", "kv_start", "seqlen_kv")


@given(
    st.sampled_from(sorted(SEEKING)),
    st.lists(st.integers(0, 700), min_size=1, max_size=12),
    st.integers(0, 500),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_every_varlen_tile_is_processed_once(
    order: str, lengths: list[int], spare: int, most_workers: int, kv_heads: int, group: int, section: int
) -> None:
    keys = [3 * length + 1 for length in lengths]
    q_starts, kv_starts = ([0, *itertools.accumulate(part)] for part in (lengths, keys))
    heads, sequences = kv_heads * group, len(lengths)
    # Buffers may have room for more tokens than there are.
    places = (q_starts[-1] + spare) // ROWS_OF_A_TILE + sequences
    total = places * heads
    workers = min(most_workers, total)
    schedule = (total, places, min(section, heads), heads, heads, group)
    heads_of_kv = (kv_heads, group)
    length_arguments = (Place(q_starts), Place(kv_starts), sequences, (sequences - 1).bit_length())
    located = []
    for worker in range(workers):
        index = worker
        while True:
            index, tile = SEEKING[order](index, workers, *schedule, *heads_of_kv, *length_arguments)
            if index >= total:
                break
            located.append(tuple(getattr(tile, name) for name in FIELDS))
            index += workers
    assert sorted(located) == sorted(
        (tile, head // group, head, q_starts[sequence], length, kv_starts[sequence], keys[sequence])
        for sequence, length in enumerate(lengths)
        for tile in range(math.ceil(length / ROWS_OF_A_TILE))
        for head in range(heads)
    )


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
