"""Tests of emulated Hopper kernels with features, masks, biases and block masks against a reference."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Problem
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, a_config, sampled_configs
from tests.problems.kernel_cases import HOPPER, HOPPER_BLOCKS, HOPPER_MASKED
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    CONFIGS,
    MIXED,
    SMALL,
    THREE,
    a_small,
    kernel_of,
    worst_error,
)

LENGTHS = [(200, 300), (150, 420), (420, 150)]


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("name", HOPPER)
def test_features(config: dict[str, Any], name: str) -> None:
    causal, features = HOPPER[name]
    for queries, keys in LENGTHS:
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=2, **features)
        assert worst_error(kernel_of(problem, **config), problem, 3) < 1e-12, (queries, keys)


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("name", HOPPER)
def test_device_lengths(config: dict[str, Any], name: str) -> None:
    causal, features = HOPPER[name]
    problem = a_small(causal, seqlen_q=150, seqlen_kv=250, batch=4, kv_lengths=True, **features)
    assert worst_error(kernel_of(problem, **config), problem, 5) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("name", [name for name in HOPPER if "dropout" not in name])
def test_packed_sequences(config: dict[str, Any], name: str) -> None:
    causal, features = HOPPER[name]
    for lengths, kv_lengths in (
        ([(0, 9), *MIXED], False),
        ([(30, 0), (70, 3), (0, 9), (5, 0), (190, 200)], True),
    ):
        problem = a_small(causal, packed=1, kv_lengths=kv_lengths, **features)
        assert worst_error(kernel_of(problem, **config), problem, 7, lengths, spare=100) < 1e-12, lengths


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", HOPPER)
def test_packed_heads(name: str) -> None:
    causal, features = HOPPER[name]
    problem = a_small(causal, heads=10, kv_heads=2, seqlen_q=20, batch=2, kv_lengths=True, **features)
    config = {"num_consumer_groups": 2, "rows_per_group": 64, "block_n": 64, "pack_gqa": 4}
    assert worst_error(kernel_of(problem, **config), problem, 3) < 1e-12


def a_feature_problem(chance: random.Random) -> tuple[Problem, list[tuple[int, int]] | None]:
    """A problem with random features and lengths, and the lengths of its packed sequences."""
    causal = chance.choice(list(Causal))
    fields: dict[str, Any] = {
        name: chance.choice(values)
        for name, values, share in (
            ("window_left", (0, 30, 64, 130), 0.4),
            ("window_right", (0, 20, 64, 100), 0.2),
            ("sink_tokens", (1, 5, 64, 100), 0.3),
            ("chunk", (32, 64, 100, 128), 0.3),
            ("prefix", (True,), 0.3),
            ("softcap", (True,), 0.25),
            ("alibi", (True,), 0.3),
            ("sinks", (True,), 0.3),
            ("kv_lengths", (True,), 0.3),
        )
        if chance.random() < share
    }
    kv_heads, group = chance.choice(((1, 1), (2, 1), (1, 3), (2, 4)))
    shape = {"kv_heads": kv_heads, "heads": kv_heads * group, "batch": chance.randint(1, 3)}
    shape |= {"seqlen_q": chance.randint(1, 300), "seqlen_kv": chance.randint(1, 300)}
    lengths = None
    if chance.random() < 0.4:
        lengths = [(chance.randint(0, 200), chance.randint(0, 200)) for _ in range(chance.randint(1, 5))]
        fields["packed"] = 1
    elif chance.random() < 0.2:
        fields["dropout"] = True
    return a_small(causal, **shape, **fields), lengths


@pytest.mark.slow
def test_random_features(fuzz_count: Callable[[int, int], int]) -> None:
    chance = random.Random(8)
    for _ in range(fuzz_count(25, 400)):
        problem, lengths = a_feature_problem(chance)
        (config,) = sampled_configs(problem, 1, chance.randint(0, 10**6))
        kernel = render(FAMILY, problem, config, Specialization(lse=True))
        if lengths is not None and not sum(queries for queries, _ in lengths):
            continue
        # A launch has no more programs than tiles.
        packs = problem.batch * problem.kv_heads * -(-problem.group_size // config.pack_gqa)
        tiles = packs * -(-problem.seqlen_q * config.pack_gqa // config.block_m)
        programs = min(chance.randint(1, 9), 9 if lengths else tiles)
        worst = worst_error(kernel, problem, programs, lengths, spare=70 if lengths else 0)
        assert worst < 1e-11, (problem, config, lengths)


TALL = {**SMALL, "block_n": 128, "num_stages": 3, "q_stages": 2}
PACKED = {**SMALL, "pack_gqa": 2, "q_stages": 2, "dynamic_schedule": False}
BLOCK_CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "a list of each group": (64, {**SMALL, "dynamic_schedule": False}),
    "three groups": (128, {**THREE, "dynamic_schedule": False}),
    "one group": (128, ALONE),
    "one list": (128, TALL),
    "one list, parts": (128, {**SMALL, "dynamic_schedule": False}),
    "heads of a tile": (64, PACKED),
}
BLOCK_LENGTHS = [(200, 300), (420, 150), (20, 700), (300, 602)]


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("layout", BLOCK_CONFIGS)
@pytest.mark.parametrize("name", HOPPER_BLOCKS)
def test_block_masks(layout: str, name: str) -> None:
    config = BLOCK_CONFIGS[layout][1]
    for queries, keys in BLOCK_LENGTHS:
        problem = a_block_mask(layout, name, queries, keys)
        chosen = a_config(problem, **config)
        worst = worst_error(kernel_of(problem, **config), problem, 2, config=chosen)
        assert worst < 1e-12, (queries, keys)


def a_block_mask(layout: str, name: str, queries: int, keys: int) -> Problem:
    size, config = BLOCK_CONFIGS[layout]
    causal, features = HOPPER_BLOCKS[name]
    lists = BlockLists.GROUP if config["pack_gqa"] > 1 else BlockLists.HEAD
    return a_small(
        causal, seqlen_q=queries, seqlen_kv=keys, batch=2, block_mask=size, block_lists=lists, **features
    )


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("name", HOPPER_MASKED)
def test_masks_and_biases(config: dict[str, Any], bias: Bias, name: str) -> None:
    causal, features = HOPPER_MASKED[name]
    for queries, keys in BLOCK_LENGTHS:
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=2, bias=bias, **features)
        chosen = a_config(problem, **config)
        worst = worst_error(kernel_of(problem, **config), problem, 3, config=chosen)
        assert worst < 1e-12, (queries, keys)
