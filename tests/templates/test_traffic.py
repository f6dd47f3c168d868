"""HBM traffic: counted against loops written out, and ordered as the algorithms are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.problem import Causal, Direction, Dtype, Problem
from flashtune.standard import standard_hbm_items
from flashtune.target import find_target
from flashtune.templates.common.traffic import cycled_queries, floor_sum, streamed_keys, unpacked
from flashtune.templates.family import TrafficItem
from flashtune.templates.registry import find_family

H200 = find_target("h200")
LENGTH = st.integers(0, 400)
BLOCK = st.sampled_from([16, 32, 64, 128])


def a_problem(
    seqlen_q: int, seqlen_kv: int, causal: Causal = Causal.NONE, heads: int = 16, batch: int = 1
) -> Problem:
    return Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=64,
        heads=heads,
        kv_heads=heads,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=causal,
    )


@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_floor_sum(count: int, divisor: int, step: int, start: int) -> None:
    assert floor_sum(count, divisor, step, start) == sum((start + step * i) // divisor for i in range(count))


@given(LENGTH, LENGTH, BLOCK, BLOCK, st.sampled_from(list(Causal)))
def test_rows_are_counted_as_the_loops_read_them(
    seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, causal: Causal
) -> None:
    problem = a_problem(seqlen_q, seqlen_kv, causal)
    masked = causal is not Causal.NONE
    keys = 0
    for first_query in range(0, seqlen_q, block_m):
        last_key = min(first_query + block_m + problem.diagonal, seqlen_kv) if masked else seqlen_kv
        keys += sum(min(block_n, seqlen_kv - start) for start in range(0, last_key, block_n))
    assert streamed_keys(problem, block_m, block_n) == keys
    queries = 0
    last_key = min(seqlen_q + problem.diagonal, seqlen_kv) if masked else seqlen_kv
    for start in range(0, last_key, block_n):
        first_seer = max(start - problem.diagonal, 0) // block_m * block_m if masked else 0
        queries += seqlen_q - first_seer
    assert cycled_queries(problem, block_m, block_n) == queries


@given(
    LENGTH,
    st.integers(1, 400),
    BLOCK,
    BLOCK,
    st.sampled_from(list(Causal)),
    st.one_of(st.none(), st.integers(0, 300)),
    st.one_of(st.none(), st.integers(0, 300)),
)
def test_windows_leave_out_whole_blocks(
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    causal: Causal,
    left: int | None,
    right: int | None,
) -> None:
    problem = msgspec.structs.replace(
        a_problem(seqlen_q, seqlen_kv, causal), window_left=left, window_right=right
    )
    reach = problem.sight.right
    keys = 0
    for first_query in range(0, seqlen_q, block_m):
        place = first_query + problem.diagonal
        last_key = seqlen_kv if reach is None else min(place + block_m + reach, seqlen_kv)
        keys += sum(min(block_n, seqlen_kv - start) for start in range(0, last_key, block_n))
        hidden = 0 if left is None else max(0, place - left) // block_n
        keys -= min(hidden, seqlen_kv // block_n) * block_n
    assert streamed_keys(problem, block_m, block_n) == keys


def test_packed_sequences_count_as_so_many_of_the_longest() -> None:
    problem = msgspec.structs.replace(a_problem(1000, 1000, batch=64), packed=2500)
    assert unpacked(problem) == a_problem(1000, 1000, batch=3)
    assert unpacked(a_problem(10, 10)) == a_problem(10, 10)


def total(items: tuple[TrafficItem, ...]) -> int:
    return sum(item.bytes for item in items)


def family_items(name: str, problem: Problem, with_cache: bool) -> tuple[TrafficItem, ...]:
    family = find_family(name)
    config = family.config_type(block_m=64, block_n=64, num_warps=4, num_stages=1)  # type: ignore[call-arg]
    return family.hbm_items(problem, config, H200 if with_cache else None)


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("seqlen", [256, 2048, 16384])
def test_carrying_rows_through_memory_costs_more_than_streaming_keys(seqlen: int, causal: Causal) -> None:
    problem = a_problem(seqlen, seqlen, causal, batch=16384 // seqlen)
    streaming = total(family_items("forward_q_outer", problem, with_cache=True))
    assert problem.minimal_bytes() == streaming  # a head's keys stay in an H200's L2
    assert total(family_items("forward_kv_outer", problem, with_cache=True)) > 2 * streaming
    assert total(family_items("forward_kv_outer", problem, False)) > total(
        family_items("forward_q_outer", problem, False)
    )


@pytest.mark.parametrize("name", ["forward_q_outer", "forward_kv_outer"])
@pytest.mark.parametrize("causal", list(Causal))
def test_a_cache_never_adds_traffic_and_no_order_beats_the_minimum(name: str, causal: Causal) -> None:
    for seqlen_q, seqlen_kv in ((1, 4096), (100, 100), (8192, 8192), (1 << 30, 1 << 30)):
        problem = a_problem(seqlen_q, seqlen_kv, causal)
        without, cached = (total(family_items(name, problem, cache)) for cache in (False, True))
        assert cached <= without
        # A causal query near the start needs few keys, so the minimum counts keys that none needs.
        if causal is not Causal.TOP_LEFT:
            assert cached >= problem.minimal_bytes()


def test_the_standard_computation_moves_its_scores() -> None:
    problem = a_problem(1024, 2048)
    pairs = 16 * 1024 * 2048
    # Written, scaled, softmax, rounded to bf16, read.
    assert total(standard_hbm_items(problem)) == problem.minimal_bytes() + (4 + 8 + 8 + 6 + 2) * pairs
    causal = a_problem(1024, 2048, Causal.TOP_LEFT)
    assert total(standard_hbm_items(causal)) == total(standard_hbm_items(problem)) + 8 * pairs


def test_the_standard_gradients_move_weights_and_scores_once_more() -> None:
    problem = msgspec.structs.replace(a_problem(1024, 2048), direction=Direction.BACKWARD)
    pairs = 16 * 1024 * 2048
    items = standard_hbm_items(problem)
    # Weights read, their gradients written and widened, softmax, scaled, read twice.
    of_pairs = (2 + 2 + 6 + 12 + 8 + 8) * pairs
    # All that is read or written anyway, less the output and the log-sum-exp, and its gradient twice.
    rows = 16 * 1024
    assert total(items) - of_pairs == problem.minimal_bytes() - 4 * rows
    causal = msgspec.structs.replace(problem, causal=Causal.TOP_LEFT)
    assert total(standard_hbm_items(causal)) == total(items) + 8 * pairs
    assert len({item.name for item in items}) == len(items)


@pytest.mark.parametrize("name", ["forward_q_outer", "forward_kv_outer"])
def test_items_are_named_apart_and_not_negative(name: str) -> None:
    for with_cache in (False, True):
        items = family_items(name, a_problem(300, 500, Causal.BOTTOM_RIGHT), with_cache)
        assert len({item.name for item in items}) == len(items)
        assert all(item.bytes >= 0 for item in items)
