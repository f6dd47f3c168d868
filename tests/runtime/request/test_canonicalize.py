"""Tests that a canonical problem computes the same for all lengths."""

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.canonical import normal_form
from flashtune.core.problem import Causal
from tests.problems.plain_masks import visible

PROBLEM = testing.problem("heads=1,kv_heads=1,seqlen=8,head_dim=64,dtype=bf16")


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(
    seqlen_q=st.integers(0, 9),
    seqlen_kv=st.integers(0, 9),
    causal=st.sampled_from(Causal),
    left=st.none() | st.integers(0, 10),
    right=st.none() | st.integers(0, 10),
    first=st.integers(0, 3),
    chunk=st.integers(0, 10),
    ragged=st.booleans(),
    prefix=st.integers(0, 3),
)
def test_canonical_problem_has_the_same_visible_pairs(
    seqlen_q: int,
    seqlen_kv: int,
    causal: Causal,
    left: int | None,
    right: int | None,
    first: int,
    chunk: int,
    ragged: bool,
    prefix: int,
) -> None:
    problem = msgspec.structs.replace(
        PROBLEM,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=causal,
        window_left=left,
        window_right=right,
        sink_tokens=first,
        chunk=chunk,
        prefix=prefix > 0,
        packed=8 * ragged,
    )
    normal = normal_form(problem)
    assert normal_form(normal) == normal
    lengths = [(seqlen_q, seqlen_kv)]
    if ragged:
        lengths = [(q, k) for q in range(seqlen_q + 1) for k in range(seqlen_kv + 1)]
    for queries, keys in lengths:
        asked, done = (visible(form, queries, keys, prefix) for form in (problem, normal))
        assert torch.equal(asked, done), (queries, keys)


@pytest.mark.parametrize(
    ("asked", "normal"),
    [
        ({"window_left": 7, "causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"window_left": 6}, {"window_left": 6}),
        ({"window_right": 0}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"window_left": 7, "window_right": 7}, {}),
        ({"chunk": 8, "causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.BOTTOM_RIGHT}),
        ({"sink_tokens": 4}, {}),
        ({"sink_tokens": 4, "chunk": 2}, {"sink_tokens": 4, "chunk": 2}),
    ],
)
def test_bounds_without_effect_are_removed(asked: dict[str, object], normal: dict[str, object]) -> None:
    replace = msgspec.structs.replace
    assert normal_form(replace(PROBLEM, **asked)) == replace(PROBLEM, **normal)
