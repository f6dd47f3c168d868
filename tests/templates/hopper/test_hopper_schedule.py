"""Tests of the tile scheduler of Hopper kernels: every tile is processed once."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.problem import Causal
from tests.emulator.hopper_schedule import LOCATES, Place, in_python, kernel_of
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
