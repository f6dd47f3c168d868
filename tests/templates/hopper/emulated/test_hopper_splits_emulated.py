"""Tests of emulated Hopper kernels that split keys, against a reference."""

from typing import Any

import pytest

from flashtune.core.problem import Causal
from tests.templates.hopper.emulated import test_hopper_pages_emulated as pages
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    EQUAL,
    MIXED,
    SMALL,
    a_small,
    kernel_of,
    worst_error,
)

# More splits than some tiles have blocks.
SPLIT: dict[str, Any] = {**SMALL, "num_splits": 3}
MANY: dict[str, Any] = {**ALONE, "num_splits": 7}
CONFIGS = pytest.mark.parametrize("config", [SPLIT, MANY], ids=["three", "seven"])


@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_dense_attention(config: dict[str, Any], causal: Causal) -> None:
    for queries, keys in ((70, 500), (200, 150), (3, 64)):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys)
        assert worst_error(kernel_of(problem, **config), problem, 5) < 1e-12, (queries, keys)


@CONFIGS
@pytest.mark.parametrize(
    ("causal", "mask"),
    [
        (Causal.BOTTOM_RIGHT, {"window_left": 100}),
        (Causal.TOP_LEFT, {"window_left": 0}),
        (Causal.NONE, {"window_left": 65, "window_right": 63}),
        (Causal.BOTTOM_RIGHT, {"chunk": 96}),
        (Causal.NONE, {"chunk": 96}),
        (Causal.BOTTOM_RIGHT, {"window_left": 40, "sink_tokens": 70}),
        (Causal.BOTTOM_RIGHT,
         {"window_left": 64, "sink_tokens": 4, "prefix": True, "kv_lengths": True, "batch": 4}),
        (Causal.NONE, {"chunk": 128, "prefix": True, "sink_tokens": 130}),
        (Causal.BOTTOM_RIGHT, {"prefix": True}),
    ],
)  # fmt: skip
def test_masks(config: dict[str, Any], causal: Causal, mask: dict[str, Any]) -> None:
    for queries, keys in ((70, 500), (200, 150)):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, **mask)
        assert worst_error(kernel_of(problem, **config), problem, 5) < 1e-12, (queries, keys)


@CONFIGS
def test_changed_scores_and_sinks(config: dict[str, Any]) -> None:
    features: dict[str, Any]
    for features in (
        {"softcap": True, "sinks": True},
        {"alibi": True, "sinks": True, "kv_lengths": True, "batch": 3},
        {"alibi": True, "causal": Causal.BOTTOM_RIGHT, "window_left": 50},
    ):
        shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "seqlen_q": 20, **features}
        problem = a_small(**shape)
        packed = {**config, "pack_gqa": 4}
        assert worst_error(kernel_of(problem, **packed), problem, 5) < 1e-12, features


@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_packed_sequences(config: dict[str, Any], causal: Causal) -> None:
    features: dict[str, Any]
    for features in (
        {},
        {"window_left": 70, "sinks": True},
        {"alibi": True, "sink_tokens": 3, "window_left": 5},
    ):
        problem = a_small(causal, packed=1, **features)
        for lengths, programs in ((EQUAL, 3), (MIXED, 8), ([(30, 0), (70, 3), (0, 9), (5, 0)], 2)):
            worst = worst_error(kernel_of(problem, **config), problem, programs, lengths, spare=100)
            assert worst < 1e-12, (features, lengths)


@CONFIGS
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_pages(config: dict[str, Any], page: int, packed: bool) -> None:
    lengths = pages.MIXED if packed else pages.EQUAL
    features: dict[str, Any]
    for features in (
        {},
        {"window_left": 70, "sink_tokens": 65},
        {"sinks": True, "tree": True, "causal": Causal.NONE},
    ):
        problem = pages.a_paged(page, packed=packed, **features)
        own = {**config, "pack_gqa": 1 if packed else 2}
        assert pages.worst_error(kernel_of(problem, **own), problem, lengths) < 1e-12, features


@pytest.mark.parametrize("stored", [pages.UNSCALED, pages.SCALED], ids=["e4m3", "int8"])
@pytest.mark.parametrize("packed", [False, True])
def test_pages_in_eight_bits(stored: dict[str, Any], packed: bool) -> None:
    lengths = pages.MIXED if packed else pages.EQUAL
    problem = pages.a_paged(16, packed=packed, head_dim=64, value_head_dim=64, **stored)
    for config in (SPLIT, MANY):
        kernel = kernel_of(problem, **config, split_epilogue=False)
        assert pages.worst_error(kernel, problem, lengths) < 1e-12


def test_head_dims() -> None:
    for widths in ((96, 80), (40, 24)):
        problem = a_small(head_dim=widths[0], value_head_dim=widths[1], seqlen_q=70)
        for split in (True, False):
            kernel = kernel_of(problem, **SPLIT, split_head_dim=split)
            assert worst_error(kernel, problem, 4) < 1e-12, widths
