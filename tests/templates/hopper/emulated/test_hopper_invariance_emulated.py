"""Tests of emulated batch-invariant Hopper kernels: results, and rows under other schedules."""

from typing import Any

import pytest

from flashtune.core.problem import Causal
from flashtune.templates.forward_hopper import context
from tests.templates.hopper.emulated import test_hopper_pages_emulated as pages
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    MIXED,
    SMALL,
    a_small,
    kernel_of,
    worst_error,
)

CONFIGS = pytest.mark.parametrize(
    "config",
    [SMALL, ALONE, {**SMALL, "num_splits": 2}],
    ids=["two", "one", "split"],
)


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ORDERED_KEYS", 128)


@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_dense_attention(config: dict[str, Any], causal: Causal) -> None:
    for queries, keys in ((70, 500), (200, 150), (3, 64)):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch_invariant=True)
        assert worst_error(kernel_of(problem, **config), problem, 2) < 1e-12, (queries, keys)


@CONFIGS
def test_features(config: dict[str, Any]) -> None:
    features: dict[str, Any]
    for features in (
        {"softcap": True, "kv_lengths": True, "batch": 3},
        {"alibi": True, "causal": Causal.BOTTOM_RIGHT},
        {"head_dim": 96, "value_head_dim": 80},
    ):
        shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "seqlen_q": 20, **features}
        problem = a_small(batch_invariant=True, **shape)
        packed = {**config, "pack_gqa": 4}
        assert worst_error(kernel_of(problem, **packed), problem, 2) < 1e-12, features


@pytest.mark.parametrize(
    "features",
    [
        {"sinks": True},
        {"window_left": 100, "sinks": True},
        {"window_left": 40, "sink_tokens": 70},
        {"window_left": 260, "sink_tokens": 3},
        {"chunk": 96},
        {"window_left": 64, "sink_tokens": 4, "prefix": True, "kv_lengths": True, "batch": 4},
    ],
)
def test_masks_and_sinks(features: dict[str, Any]) -> None:
    for queries, keys in ((70, 500), (200, 650)):
        problem = a_small(
            Causal.BOTTOM_RIGHT, seqlen_q=queries, seqlen_kv=keys, batch_invariant=True, **features
        )
        for config in (SMALL, ALONE):
            assert worst_error(kernel_of(problem, **config), problem, 2) < 1e-12, (queries, keys)


@pytest.mark.parametrize("config", [SMALL, {**SMALL, "num_splits": 2}], ids=["folded", "split"])
@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_pages(config: dict[str, Any], page: int, packed: bool) -> None:
    lengths = pages.MIXED if packed else pages.EQUAL
    problem = pages.a_paged(page, packed=packed, batch_invariant=True)
    own = {**config, "pack_gqa": 1 if packed else 2}
    assert pages.worst_error(kernel_of(problem, **own), problem, lengths) < 1e-12


def test_packed_sequences() -> None:
    problem = a_small(Causal.BOTTOM_RIGHT, packed=1, batch_invariant=True, sinks=True)
    assert worst_error(kernel_of(problem, **SMALL), problem, 4, MIXED, spare=100) < 1e-12
