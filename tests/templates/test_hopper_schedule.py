"""Who works on what in a Hopper kernel: its own functions of tiles and blocks, as Python computes them."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.compilation import load_module
from flashtune.kernel import Kernel
from flashtune.problem import Causal, Problem
from flashtune.templates.rendering import render
from tests.hopper import FAMILY, PLAIN, a_config, a_problem


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    return render(FAMILY, problem, a_config(problem, **changes), PLAIN)


def in_python(kernel: Kernel, name: str) -> Callable[..., Any]:
    """A function of the kernel's source that only counts, as Python computes it."""
    (function,) = (node for node in ast.parse(kernel.source).body if getattr(node, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    gl = SimpleNamespace(
        where=lambda test, yes, no: yes if test else no,
        minimum=min,
        maximum=max,
        load=lambda place: place.values[place.offset],
    )
    module = load_module(kernel)
    constants = {name: getattr(module, name, None) for name in ("BLOCK_N", "PACK", "TILE", "LEFT", "RIGHT")}
    names: dict[str, Any] = {
        "gl": gl,
        **{name: one.value for name, one in constants.items() if one is not None},
    }
    if name == "seek":
        names["locate"] = in_python(kernel, "locate")
    exec(compile(ast.Module([function], []), name, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


class Place(NamedTuple):
    """A pointer as `gl.load` of such a function takes it."""

    values: list[int]
    offset: int = 0

    def __add__(self, steps: object) -> Place:
        assert isinstance(steps, int)
        return Place(self.values, self.offset + steps)


CAUSAL = a_problem(64, causal=Causal.BOTTOM_RIGHT)
LOCATES = {
    (order, pack): in_python(kernel_of(CAUSAL, order=order, pack=pack), "locate")
    for order in ("linear", "long_first", "alternate")
    for pack in (1, 4)
}


@given(
    st.sampled_from(sorted(LOCATES)),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_every_tile_is_worked_on_once(
    kind: tuple[str, int], most_workers: int, tiles: int, batch: int, kv_heads: int, group: int, section: int
) -> None:
    order, pack = kind
    packs_per_kv = math.ceil(group / pack)
    packs = kv_heads * packs_per_kv
    total = tiles * batch * packs
    section, workers = min(section, batch * packs), min(most_workers, total)
    schedule = (total, tiles, section, batch * packs, packs, packs_per_kv)
    found = [LOCATES[kind](index, workers, *schedule) for index in range(total)]
    assert sorted(found) == [
        (tile, sequence, kv_head, head)
        for tile in range(tiles)
        for sequence in range(batch)
        for kv_head in range(kv_heads)
        for head in range(0, group, pack)
    ]
    if order != "alternate":
        # The heads of a section are done before those of the next, tile by tile.
        ranks = [
            (
                (sequence * packs + kv_head * packs_per_kv + head // pack) // section,
                tile if order == "linear" else -tile,
            )
            for tile, sequence, kv_head, head in found
        ]
        assert ranks == sorted(ranks)


def test_who_had_a_long_tile_gets_a_short_one() -> None:
    workers, total, tiles, heads = 8, 128, 32, 4

    def spread(order: str) -> int:
        """Between the programs with the most and with the least to do."""
        locate = LOCATES[order, 1]
        lengths = [locate(index, workers, total, tiles, heads, heads, heads, 1)[0] for index in range(total)]
        work = [sum(map(int, lengths[worker::workers])) for worker in range(workers)]
        return max(work) - min(work)

    assert spread("alternate") == 0
    assert spread("long_first") > 0


COUNTS = {
    causal: in_python(kernel_of(problem), "count_blocks")
    for causal in Causal
    for problem in [a_problem(64, causal=causal)]
}


@given(
    st.sampled_from(list(Causal)),
    st.integers(0, 20),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(1, 700),
)
def test_blocks_are_those_that_some_query_sees(
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
        # What a group passes by is what is left: all take as many tiles as the producer copies.
        assert 1 <= own <= whole


# ---- windows ---------------------------------------------------------------------------------------

WINDOWS = [
    (Causal.BOTTOM_RIGHT, {"window_left": 0}),
    (Causal.BOTTOM_RIGHT, {"window_left": 1024}),
    (Causal.TOP_LEFT, {"window_left": 100}),
    (Causal.NONE, {"window_left": 300}),
    (Causal.NONE, {"window_right": 70}),
    (Causal.NONE, {"window_left": 129, "window_right": 127}),
]


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_groups_take_every_block_that_some_row_sees_and_pass_the_others_by(
    causal: Causal, window: dict[str, int], data: st.DataObject
) -> None:
    groups, rows = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 64, 128]))
    lengths = {name: data.draw(st.integers(1, 2500)) for name in ("seqlen_q", "seqlen_kv")}
    problem = msgspec.structs.replace(a_problem(64, causal=causal), **window, **lengths)
    count, skip = (COUNTED[causal, tuple(window.items())][name] for name in ("count_blocks", "skip_blocks"))
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
    kernel = kernel_of(msgspec.structs.replace(a_problem(64, causal=causal), **window))
    names = ("count_blocks", "skip_blocks") if "window_left" in window else ("count_blocks",)
    return {"skip_blocks": None, **{name: in_python(kernel, name) for name in names}}


COUNTED = {(causal, tuple(window.items())): counting(causal, window) for causal, window in WINDOWS}


def seen_blocks(problem: Problem, query: int) -> range:
    """Blocks of 128 keys in which a query sees some, by the definition."""
    place, left, right = query + problem.diagonal, problem.sight.left, problem.sight.right
    start = 0 if left is None else max(0, place - left)
    end = problem.seqlen_kv if right is None else min(place + right + 1, problem.seqlen_kv)
    return range(start // 128, math.ceil(end / 128)) if start < end else range(0)


# ---- packed sequences ------------------------------------------------------------------------------

PACKED = a_problem(64, causal=Causal.BOTTOM_RIGHT, packed=1)
SEEKS = {order: kernel_of(PACKED, order=order) for order in ("linear", "long_first", "alternate")}
SEEKING = {order: in_python(kernel, "seek") for order, kernel in SEEKS.items()}
ROWS_OF_A_TILE = 192


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
def test_every_tile_of_packed_sequences_is_worked_on_once(
    order: str, lengths: list[int], spare: int, most_workers: int, kv_heads: int, group: int, section: int
) -> None:
    keys = [3 * length + 1 for length in lengths]
    q_starts, kv_starts = ([0, *itertools.accumulate(one)] for one in (lengths, keys))
    heads, sequences = kv_heads * group, len(lengths)
    # Buffers may have room for more tokens than there are.
    places = (q_starts[-1] + spare) // ROWS_OF_A_TILE + sequences
    total = places * heads
    workers = min(most_workers, total)
    schedule = (total, places, min(section, heads), heads, heads, group)
    given_lengths = (Place(q_starts), Place(kv_starts), sequences, (sequences - 1).bit_length())
    found = []
    for worker in range(workers):
        index = worker
        while True:
            index, *tile = SEEKING[order](index, workers, *schedule, *given_lengths)
            if index >= total:
                break
            found.append(tuple(tile))
            index += workers
    assert sorted(found) == sorted(
        (tile, head // group, head, q_starts[sequence], length, kv_starts[sequence], keys[sequence])
        for sequence, length in enumerate(lengths)
        for tile in range(math.ceil(length / ROWS_OF_A_TILE))
        for head in range(heads)
    )
