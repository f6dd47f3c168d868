"""Tests of problems and of the descriptions of their features."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtune import testing
from flashtune.core.errors import ProblemError
from flashtune.core.features.description import ScoreRows
from flashtune.core.features.mask_geometry import MaskInfo, distinct_keys, visible_pairs
from flashtune.core.features.records import FIELDS, NUMBERS, TENSORS, TYPES, ExtraInputs, FeatureFields
from flashtune.core.features.table import (
    FEATURES,
    NUMBER_INPUTS,
    TENSOR_INPUTS,
    changed_scores,
    flags_of,
    score_derivative,
    usual_inputs,
)
from flashtune.core.problem import Causal, Dtype, Feature, Problem
from flashtune.tuner.workloads.shapes import parse_shape

PROBLEMS = st.builds(
    Problem,
    dtype=st.sampled_from(Dtype),
    head_dim=st.integers(1, 256),
    value_head_dim=st.integers(1, 256),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    batch=st.integers(0, 3),
    seqlen_q=st.integers(0, 40),
    seqlen_kv=st.integers(0, 40),
    causal=st.sampled_from(Causal),
)


def counted_pairs(problem: Problem) -> int:
    if problem.causal is Causal.NONE:
        return problem.seqlen_q * problem.seqlen_kv
    seen = (query + problem.diagonal + 1 for query in range(problem.seqlen_q))
    return sum(min(max(keys, 0), problem.seqlen_kv) for keys in seen)


@pytest.mark.slow
@given(PROBLEMS)
def test_visible_pairs_match_brute_force_count(problem: Problem) -> None:
    assert problem.visible_pairs() == counted_pairs(problem)


SIGHTS = st.builds(
    MaskInfo,
    seqlen_q=st.integers(0, 24),
    seqlen_kv=st.integers(0, 24),
    diagonal=st.integers(-24, 24),
    left=st.none() | st.integers(0, 24),
    right=st.none() | st.integers(0, 24),
    first=st.integers(0, 24),
    chunk=st.integers(0, 9),
)


def seen_keys(sight: MaskInfo, query: int) -> set[int]:
    position, seen = query + sight.diagonal, set()
    for key in range(sight.seqlen_kv):
        windowed = sight.left is None or key >= position - sight.left
        own = not sight.chunk or key // sight.chunk == position // sight.chunk
        reached = sight.right is None or key <= position + sight.right
        if reached and (key < sight.first or (windowed and own)):
            seen.add(key)
    return seen


@given(SIGHTS)
def test_visible_keys_of_windows_and_chunks_match_brute_force_count(sight: MaskInfo) -> None:
    rows = [seen_keys(sight, query) for query in range(sight.seqlen_q)]
    assert visible_pairs(sight) == sum(map(len, rows))
    assert distinct_keys(sight) == len(set().union(*rows))


def test_visible_pairs_of_chunks_are_computed_in_closed_form() -> None:
    long = 2**31 - 1
    assert visible_pairs(MaskInfo(long, long, 0, None, None, 0, 1)) == long
    assert visible_pairs(MaskInfo(8, 8, 0, None, None, 0, 4)) == 32


@given(PROBLEMS)
def test_problem_round_trips_through_json(problem: Problem) -> None:
    assert msgspec.json.decode(msgspec.json.encode(problem), type=Problem) == problem


@given(PROBLEMS, PROBLEMS)
def test_only_equal_problems_have_equal_keys(first: Problem, other: Problem) -> None:
    assert (first.key == other.key) == (first == other)


def test_nominal_flops_halve_when_causal() -> None:
    full = testing.problem("heads=16,seqlen=8192,head_dim=128,dtype=bf16,batch=2")
    assert full.nominal_flops() == 4 * 2 * 16 * 8192**2 * 128
    assert msgspec.structs.replace(full, causal=Causal.TOP_LEFT).nominal_flops() * 2 == full.nominal_flops()


def test_nominal_flops_count_visible_pairs_only() -> None:
    full = testing.problem("heads=16,seqlen=1024,head_dim=128,dtype=bf16,batch=4")
    # Half of the tokens that four sequences of the longest length would have.
    packed = msgspec.structs.replace(full, packed=2048)
    assert packed.nominal_flops() * 2 == packed.flops() * 2 == full.nominal_flops()
    windowed = msgspec.structs.replace(full, causal=Causal.BOTTOM_RIGHT, window_left=0)
    assert windowed.nominal_flops() == 4 * 4 * 16 * 1024 * 128
    assert msgspec.structs.replace(full, softcap=True).nominal_flops() == full.nominal_flops()


def test_minimal_bytes_count_wider_outputs_of_quantized_inputs() -> None:
    wide = testing.problem(
        "heads=4,kv_heads=2,seqlen_q=10,seqlen_kv=20,head_dim=64,value_head_dim=32,dtype=bf16"
    )
    narrow = msgspec.structs.replace(wide, dtype=Dtype.E4M3)
    assert (narrow.out_dtype, wide.out_dtype) == (Dtype.BF16, Dtype.BF16)
    inputs, output = 4 * 10 * 64 + 2 * 20 * (64 + 32), 4 * 10 * 32
    assert wide.minimal_bytes() == 2 * inputs + 2 * output
    assert narrow.minimal_bytes() == inputs + 2 * output


@pytest.mark.parametrize("ragged", [{"page_size": 16}, {"kv_lengths": True}], ids=["pages", "lengths"])
def test_minimal_bytes_of_ragged_sequences_use_mean_length(ragged: dict[str, Any]) -> None:
    equal = testing.problem(
        "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,dtype=bf16,causal,batch=5"
    )
    queries = 2 * 2 * 5 * 32 * 128
    of_key = 2 * 2 * 8 * 128
    assert equal.minimal_bytes() == queries + of_key * 5 * 8192
    shorter = msgspec.structs.replace(equal, **ragged)
    assert shorter.minimal_bytes() == queries + of_key * 4 * 8192
    windowed = msgspec.structs.replace(shorter, window_left=4095)
    assert windowed.minimal_bytes() == queries + of_key * 5 * 4096
    single = msgspec.structs.replace(equal, batch=1)
    assert msgspec.structs.replace(single, **ragged).minimal_bytes() == single.minimal_bytes()


def test_query_heads_must_divide_among_kv_heads() -> None:
    with pytest.raises(ProblemError, match="5 query heads do not divide among 2 KV heads"):
        Problem(
            dtype=Dtype.FP16,
            head_dim=64,
            value_head_dim=64,
            heads=5,
            kv_heads=2,
            batch=1,
            seqlen_q=1,
            seqlen_kv=1,
        )


def test_every_feature_has_one_description() -> None:
    assert set(FEATURES) == set(Feature)


def test_every_field_belongs_to_one_feature() -> None:
    named = [
        field for description in FEATURES.values() for field in (*description.fields, *description.details)
    ]
    assert sorted(named) == sorted(FIELDS)


def test_every_extra_input_has_a_description() -> None:
    # Numbers are last, because kernels take them after the scale.
    assert set(TENSORS) == set(TENSOR_INPUTS)
    assert set(NUMBERS) == set(NUMBER_INPUTS)


def test_inputs_set_the_flags_of_their_features() -> None:
    for description in FEATURES.values():
        for extra_input in description.numbers or description.tensors:
            flags = flags_of(ExtraInputs()._replace(**dict[str, Any]({extra_input.name: 1.0})))
            assert [name for name, there in flags.items() if there] == [
                field for field in description.fields if bool in TYPES[field]
            ]


SCORED = [feature for feature, description in FEATURES.items() if description.change]


@pytest.mark.parametrize("feature", SCORED)
def test_derivatives_are_those_of_autograd(feature: Feature) -> None:
    (problem,) = parse_shape(f"heads=2,seqlen=6,head_dim=8,batch=2,dtype=fp32,{FEATURES[feature].example}")
    device = torch.device("cpu")
    made = usual_inputs(problem, [feature], (6, 6), torch.float32, device)
    positions = torch.arange(6, dtype=torch.float64)[:, None]
    distances = (positions - torch.arange(6)).abs()
    rows = ScoreRows[FeatureFields, ExtraInputs](
        problem,
        ExtraInputs(**made),
        lambda tensor: tensor[:, :, None, None],
        lambda bias: bias,
        lambda: positions,
        lambda: distances,
    )
    scores = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    changed, added = changed_scores(scores, rows, sizes=True)
    (expected,) = torch.autograd.grad(changed.sum(), scores)
    derivative = score_derivative(scores.detach(), rows)
    torch.testing.assert_close(torch.ones_like(scores) if derivative is None else derivative, expected)
    if added is not None:
        torch.testing.assert_close(added.double(), (changed - scores).detach().abs())


def test_words_of_keys_differ() -> None:
    words = [description.word.split("{")[0] for description in FEATURES.values()]
    assert len(set(words)) == len(words)
