"""Who works on what in a Hopper kernel: its own functions of tiles and blocks, as Python computes them."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
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
    gl = SimpleNamespace(where=lambda test, yes, no: yes if test else no, minimum=min, maximum=max)
    module = load_module(kernel)
    names: dict[str, Any] = {"gl": gl, "BLOCK_N": module.BLOCK_N.value, "PACK": module.PACK.value}
    exec(compile(ast.Module([function], []), name, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


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
