"""Tests of the HBM traffic model against brute-force loops."""

import itertools
import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune import testing
from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.target import Target, find_target
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.templates.common.model.traffic import (
    cycled_queries,
    floor_sum,
    mean_queries,
    missed,
    missed_at_random,
    streamed_keys,
    unpacked,
)
from flashtune.templates.family import BytesItem, Family
from flashtune.templates.registry import families, find_family
from flashtune.tuner.tables.kernel_choice import change_config
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.lengths import is_ragged
from tests.support.records import shipped_table_of

H200 = find_target("h200")
LENGTH = st.integers(0, 400)
BLOCK = st.sampled_from([16, 32, 64, 128])


def a_problem(
    seqlen_q: int, seqlen_kv: int, causal: Causal = Causal.NONE, heads: int = 16, batch: int = 1
) -> Problem:
    shape = f"heads={heads},seqlen=1,head_dim=128,value_head_dim=64,dtype=bf16"
    return testing.problem(shape, batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, causal=causal)


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_floor_sum(count: int, divisor: int, step: int, start: int) -> None:
    assert floor_sum(count, divisor, step, start) == sum((start + step * i) // divisor for i in range(count))


@given(
    LENGTH,
    st.integers(1, 400),
    BLOCK,
    BLOCK,
    st.sampled_from(list(Causal)),
    st.one_of(st.none(), st.integers(0, 300)),
    st.one_of(st.none(), st.integers(0, 300)),
)
def test_windows_skip_whole_blocks(
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
        position = first_query + problem.diagonal
        last_key = seqlen_kv if reach is None else min(position + block_m + reach, seqlen_kv)
        keys += sum(min(block_n, seqlen_kv - start) for start in range(0, last_key, block_n))
        hidden = 0 if left is None else max(0, position - left) // block_n
        keys -= min(hidden, seqlen_kv // block_n) * block_n
    assert streamed_keys(problem, block_m, block_n) == keys


@given(LENGTH, LENGTH, BLOCK, BLOCK, st.sampled_from(list(Causal)))
def test_cycled_queries_match_brute_force_loops(
    seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, causal: Causal
) -> None:
    problem = a_problem(seqlen_q, seqlen_kv, causal)
    masked = causal is not Causal.NONE
    queries = 0
    last_key = min(seqlen_q + problem.diagonal, seqlen_kv) if masked else seqlen_kv
    for start in range(0, last_key, block_n):
        first_seer = max(start - problem.diagonal, 0) // block_m * block_m if masked else 0
        queries += seqlen_q - first_seer
    assert cycled_queries(problem, block_m, block_n) == queries


def test_varlen_counts_as_sequences_between_the_mean_and_the_longest_length() -> None:
    problem = msgspec.structs.replace(a_problem(1000, 2000, batch=64), packed=2500)
    assert mean_queries(problem) == 40
    assert unpacked(problem) == a_problem(200, 400, batch=13)
    in_pages = msgspec.structs.replace(problem, page_size=16)
    assert unpacked(in_pages).seqlen_kv == 2000
    equal = msgspec.structs.replace(problem, packed=64 * 1000)
    assert unpacked(equal) == a_problem(1000, 2000, batch=64)
    assert unpacked(a_problem(10, 10)) == a_problem(10, 10)


def total(items: tuple[BytesItem, ...]) -> int:
    return sum(item.bytes for item in items)


def family_items(name: str, problem: Problem, with_cache: bool) -> tuple[BytesItem, ...]:
    family = find_family(name)
    config = family.config_type(block_m=64, block_n=64, num_warps=4, num_stages=1)  # type: ignore[call-arg]
    return family.hbm_items(problem, config, H200 if with_cache else None)


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("seqlen", [256, 2048, 16384])
def test_kv_outer_order_has_more_traffic_than_q_outer(seqlen: int, causal: Causal) -> None:
    problem = a_problem(seqlen, seqlen, causal, batch=16384 // seqlen)
    streaming = total(family_items("forward_q_outer", problem, with_cache=True))
    assert problem.minimal_bytes() == streaming  # a head's keys stay in an H200's L2
    assert total(family_items("forward_kv_outer", problem, with_cache=True)) > 2 * streaming
    assert total(family_items("forward_kv_outer", problem, False)) > total(
        family_items("forward_q_outer", problem, False)
    )


@pytest.mark.parametrize("target", [H200, None])
def test_packed_query_heads_read_their_keys_once(target: Target | None) -> None:
    (problem,) = parse_shape("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16")
    family = find_family("forward_hopper")
    packed, apart = (change_config(family.default(problem, H200), f"pack_gqa={heads}") for heads in (4, 1))
    assert total(family.hbm_items(problem, packed, target)) == problem.minimal_bytes()
    assert total(family.hbm_items(problem, apart, None)) > 3 * problem.minimal_bytes()


def test_unfused_attention_transfers_its_scores() -> None:
    problem = a_problem(1024, 2048)
    pairs = 16 * 1024 * 2048
    # Written, scaled, softmax, rounded to bf16, read.
    assert total(standard_hbm_items(problem)) == problem.minimal_bytes() + (4 + 8 + 8 + 6 + 2) * pairs
    causal = a_problem(1024, 2048, Causal.TOP_LEFT)
    assert total(standard_hbm_items(causal)) == total(standard_hbm_items(problem)) + 8 * pairs


def test_unfused_gradients_transfer_probabilities_and_scores() -> None:
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


@pytest.mark.slow
def test_miss_rate_is_zero_within_the_cache_and_grows_with_size() -> None:
    assert missed(H200.l2_bytes / 2, H200) == 0
    assert missed(1, None) == 1
    assert missed_at_random(2) == pytest.approx(0.7968, abs=1e-4)
    assert missed_at_random(1e9) == 1
    last = 0.0
    for step in range(10_000):
        # Densest at 1, where both sides of the equation touch.
        ratio = 1 + 1e-8 * 1.003**step
        share = missed_at_random(ratio)
        assert share == pytest.approx(1 - math.exp(-share * ratio), abs=1e-9)
        assert last - 1e-9 <= share <= last + 2 * (ratio - 1)
        last = share


def problems_of(family: Family, target: Target) -> Iterator[Problem]:
    """Problems over head dims, groups of heads and masks, as many as a family computes."""
    for head_dim, (heads, kv_heads), causal in itertools.product(
        (64, 128, 256), ((32, 32), (32, 8), (8, 1)), (Causal.NONE, Causal.BOTTOM_RIGHT)
    ):
        problem = msgspec.structs.replace(
            a_problem(4096, 4096, causal, heads),
            value_head_dim=head_dim,
            head_dim=head_dim,
            kv_heads=kv_heads,
            direction=family.direction,
        )
        posed = (
            problem,
            msgspec.structs.replace(problem, alibi=True),
            msgspec.structs.replace(problem, seqlen_q=1),
        )
        yield from itertools.islice((case for case in posed if family.supports(case, target) is None), 1)
    latent = msgspec.structs.replace(
        a_problem(1, 4096, Causal.BOTTOM_RIGHT, heads=128), head_dim=576, value_head_dim=512, kv_heads=1
    )
    latent = msgspec.structs.replace(latent, mla=True)
    if family.supports(latent, target) is None:
        yield latent


# By how much traffic may grow over a length, relatively. One program of a head may read the same data once
# for each block. Within a few percent of length, all of these reads move from the L2 cache to HBM.
STEEPEST = {"forward_kv_outer": 800.0}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_traffic_is_continuous_in_length(family: Family, target: str) -> None:
    gpu = find_target(target)
    posed = tuple(problems_of(family, gpu))
    assert posed or (gpu.arch != "sm_90" and not family.interpreted)
    lengths = [round(256 * 1.01**step) for step in range(700)]
    lengths = sorted({length for length in lengths if length <= 1 << 17})
    for problem in posed:
        config = family.default(problem, gpu)
        moved = [total(family.hbm_items(at_length(problem, length), config, gpu)) for length in lengths]
        assert moved == sorted(moved)
        for (before, after), (less, more) in zip(
            itertools.pairwise(lengths), itertools.pairwise(moved), strict=True
        ):
            steepest = STEEPEST.get(family.name, 32.0)
            assert more / less - 1 <= steepest * (after / before - 1), (problem.key, before, after)


def at_length(problem: Problem, length: int) -> Problem:
    """A problem of as many queries as keys, or of one query."""
    queries = 1 if problem.seqlen_q == 1 else length
    return msgspec.structs.replace(problem, seqlen_q=queries, seqlen_kv=length)


def test_measured_times_are_above_the_bandwidth_bound() -> None:
    shipped = shipped_table_of(H200.name)
    # The longest sequence of several stands for all in a problem: the others move less.
    records = [
        record for record in shipped.records if record.ms and record.config and not is_ragged(record.problem)
    ]
    assert len(records) > 400
    for record in records:
        assert record.config is not None
        assert record.ms is not None
        moved = total(find_family(record.family).hbm_items(record.problem, record.config, H200))
        assert moved / (H200.hbm_bandwidth * 1e6) < record.ms, record.problem.key
