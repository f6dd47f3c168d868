"""Tests of emulated Hopper kernels with features, masks, biases, block masks and 8-bit operands."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, Problem
from flashtune.request.quantization import E4M3
from flashtune.templates.rendering import render
from tests.emulator.program import emulate
from tests.problems.hopper import FAMILY, a_config, a_problem, sampled_configs
from tests.problems.kernel_cases import HOPPER, HOPPER_BLOCKS, HOPPER_MASKED
from tests.problems.plain_masks import largest_error, plain_attention
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    CONFIGS,
    MIXED,
    SMALL,
    THREE,
    UNTOUCHED,
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


SHARED = {**SMALL, "num_consumer_groups": 3, "q_stages": 2, "p_stages": 1}
TWO_TILES = {**SHARED, "p_stages": 2, "conditional_rescale": False, "ping_pong": False}
WEIGHTS = pytest.mark.parametrize(
    "config", [SMALL, SHARED, TWO_TILES], ids=["registers", "shared", "two tiles"]
)


def in_order_of_weights(v: Tensor) -> Tensor:
    """Values as the kernel's prologue leaves them, [batch, kv_heads, head_dim, keys in groups of sixteen]."""
    batch, heads, keys, width = v.shape
    whole = torch.zeros(batch, heads, -(-keys // 16) * 16, width, dtype=v.dtype)
    whole[:, :, :keys] = v
    # Place 4t + 2b + c of sixteen holds key 8b + 2t + c.
    exchanged = whole.view(batch, heads, -1, 2, 4, 2, width).permute(0, 1, 6, 2, 4, 3, 5)
    return exchanged.reshape(batch, heads, width, -1)


def eight_bit_error(problem: Problem, config: dict[str, Any]) -> float:
    """Of outputs and log-sum-exps over plain attention; numbers are not rounded."""
    kernel = render(FAMILY, problem, a_config(problem, **config), Specialization(lse=True))
    chance = torch.Generator().manual_seed(2)

    def drawn(heads: int, length: int, width: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(problem.batch, heads, length, width, generator=chance, dtype=torch.float64)
        return values, 0.5 + torch.rand(problem.batch, heads, generator=chance, dtype=torch.float64)

    q, q_scale = drawn(problem.heads, problem.seqlen_q, problem.head_dim)
    k, k_scale = drawn(problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    v, v_scale = drawn(problem.kv_heads, problem.seqlen_kv, problem.value_head_dim)
    scale = problem.head_dim**-0.5
    scaled_q, scaled_k, scaled_v = (
        tensor * by[:, :, None, None] for tensor, by in ((q, q_scale), (k, k_scale), (v, v_scale))
    )
    expected = plain_attention(problem, scaled_q, scaled_k, scaled_v, NO_EXTRA_INPUTS, scale)
    out = torch.full((*q.shape[:3], v.shape[3]), UNTOUCHED, dtype=torch.float64)
    lse = torch.full(q.shape[:3], UNTOUCHED, dtype=torch.float64)
    inputs = (q, k, in_order_of_weights(v))
    like = (
        *(torch.empty(tensor.shape, dtype=E4M3, device="meta") for tensor in inputs),
        out.to("meta").bfloat16(),
    )
    memory = (*(tensor.flatten().numpy() for tensor in inputs), out.view(-1).numpy())
    scales = tuple(tensor.flatten().numpy() for tensor in (q_scale, k_scale, v_scale))
    emulate(kernel, like, memory, scales, lse.view(-1).numpy(), scale, 2)
    return largest_error((out, lse), expected)


@pytest.mark.slow
@WEIGHTS
@pytest.mark.parametrize("causal", list(Causal))
def test_probabilities_match_their_values(config: dict[str, Any], causal: Causal) -> None:
    problem = a_problem(32, dtype=Dtype.E4M3, causal=causal, heads=4, kv_heads=2)
    for queries, keys in ((300, 300), (129, 340), (200, 70)):
        shape = msgspec.structs.replace(problem, seqlen_q=queries, seqlen_kv=keys)
        assert eight_bit_error(shape, config) < 1e-12, (queries, keys)


@pytest.mark.slow
@WEIGHTS
def test_windows_of_eight_bits(config: dict[str, Any]) -> None:
    problem = a_problem(32, dtype=Dtype.E4M3, heads=2, kv_heads=1, batch=1, seqlen_q=400, seqlen_kv=420)
    for sides in ({"window_left": 70}, {"window_left": 65, "window_right": 63}, {"window_right": 30}):
        assert eight_bit_error(msgspec.structs.replace(problem, **sides), config) < 1e-12, sides
