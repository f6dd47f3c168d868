"""Tests of emulated Hopper backward kernels with windows, softcap, sinks, packed sequences, dropout."""

from typing import Any

import pytest

from flashtune.core.problem import Causal
from tests.templates.backward.test_backward_hopper_emulated import a_problem, emulated

WINDOWS: tuple[tuple[Causal, dict[str, int]], ...] = (
    (Causal.BOTTOM_RIGHT, {"window_left": 0}),
    (Causal.BOTTOM_RIGHT, {"window_left": 100}),
    (Causal.TOP_LEFT, {"window_left": 64}),
    (Causal.NONE, {"window_left": 70}),
    (Causal.NONE, {"window_right": 30}),
    (Causal.NONE, {"window_left": 65, "window_right": 63}),
)
LENGTHS = ((400, 400), (150, 420), (420, 150))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, True), (128, False), (256, True)])
def test_windows(head_dim: int, causal: Causal, window: dict[str, int], deterministic: bool) -> None:
    for queries, keys in LENGTHS:
        changes: dict[str, Any] = {"seqlen_q": queries, "seqlen_kv": keys, **window}
        problem = a_problem(head_dim, causal=causal, deterministic=deterministic, **changes)
        sums = emulated(problem, 3)
        if deterministic:
            added = sums.added.values()
            assert all(
                [term.program for term in order] == sorted(term.program for term in order) for order in added
            )


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(head_dim: int, turns: bool) -> None:
    turns = turns and head_dim < 256
    for changes in ({}, {"causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.TOP_LEFT, "window_left": 60}):
        problem = a_problem(head_dim, softcap=True, **changes)
        emulated(problem, 2, alternate_dq=turns)
        if head_dim < 256:
            emulated(problem, 2, alternate_dq=turns, init_accumulators=False, early_dv=turns)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks(head_dim: int) -> None:
    for changes in ({}, {"causal": Causal.BOTTOM_RIGHT, "window_left": 30, "softcap": True}):
        emulated(a_problem(head_dim, sinks=True, heads=4, kv_heads=2, **changes), 2)


EQUAL = [(64, 64), (1, 1), (0, 0), (200, 200), (129, 129), (0, 0), (97, 97)]
MIXED = [(30, 0), (70, 300), (0, 9), (150, 40), (5, 131)]


# Each mask with each order of sums, and with two or three head dims.
PACKED = (
    (64, Causal.NONE, True),
    (64, Causal.BOTTOM_RIGHT, False),
    (64, Causal.TOP_LEFT, True),
    (128, Causal.BOTTOM_RIGHT, True),
    (128, Causal.TOP_LEFT, False),
    (256, Causal.NONE, False),
    (256, Causal.BOTTOM_RIGHT, True),
)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "causal", "deterministic"), PACKED)
def test_packed_sequences(head_dim: int, causal: Causal, deterministic: bool) -> None:
    for lengths in (EQUAL, MIXED):
        problem = a_problem(head_dim, causal=causal, deterministic=deterministic, packed=1)
        sums = emulated(problem, 2, lengths, spare=100)
        if deterministic:
            added = sums.added.values()
            assert all(
                [term.program for term in order] == sorted(term.program for term in order) for order in added
            )


@pytest.mark.slow
def test_single_packed_sequence() -> None:
    emulated(a_problem(64, causal=Causal.BOTTOM_RIGHT, packed=1), 2, MIXED[1:2], spare=100)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, True), (256, False)])
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": Causal.BOTTOM_RIGHT, "window_left": 70},
        {"window_left": 20, "window_right": 100, "softcap": True},
        {"causal": Causal.TOP_LEFT, "softcap": True, "sinks": True},
    ],
    ids=["window", "softcap", "sinks"],
)
def test_packed_sequences_with_other_features(
    head_dim: int, deterministic: bool, changes: dict[str, Any]
) -> None:
    problem = a_problem(head_dim, packed=1, heads=4, kv_heads=2, deterministic=deterministic, **changes)
    emulated(problem, 3, MIXED, spare=10)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [3, 10])
def test_interleaved_heads_are_all_computed(kv_heads: int) -> None:
    """Sections of eight heads, of which the last one may have fewer."""
    problem = a_problem(128, causal=Causal.BOTTOM_RIGHT, heads=kv_heads, kv_heads=kv_heads)
    emulated(problem, 2, interleaved_heads=8)


ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"init_accumulators": False, "early_dv": True, "early_dk": False},
    {"defer_dq": True, "defer_dp_wait": True, "alternate_dq": False},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "causal", "dropout"),
    [
        (64, Causal.NONE, True),
        (64, Causal.BOTTOM_RIGHT, True),
        (128, Causal.NONE, True),
        (128, Causal.TOP_LEFT, True),
        (64, Causal.TOP_LEFT, False),
        (128, Causal.BOTTOM_RIGHT, False),
    ],
)
def test_gradients_match_the_reference_with_dropout_and_other_orders(
    head_dim: int, causal: Causal, dropout: bool
) -> None:
    for order in ORDERS:
        emulated(a_problem(head_dim, causal=causal, dropout=dropout), 2, **order)


def test_batches_have_independent_dropout() -> None:
    emulated(a_problem(64, dropout=True, batch=2, seqlen_q=70, seqlen_kv=70), 2)
