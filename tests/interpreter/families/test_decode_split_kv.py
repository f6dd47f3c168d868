"""Tests of features of the split-KV family in the interpreter, against float64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.kernel import Alignment, Specialization, specialization_of
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.compilation import load_module
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.decode_split_kv.space import DecodeConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.interpreter.families.masked_calls import FEATURES, Call, make_call
from tests.problems.plain_masks import plain_attention

TARGET = find_target("h200")
FAMILY = find_family("decode_split_kv")
LATENT = {"mla": True, "head_dim": 40, "value_head_dim": 32, "heads": 5, "kv_heads": 1}


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.FP32,
        head_dim=24,
        value_head_dim=16,
        heads=4,
        kv_heads=2,
        batch=2,
        seqlen_q=3,
        seqlen_kv=67,
    )
    return msgspec.structs.replace(problem, **changes)


def a_call(problem: Problem) -> Call:
    """Tensors and side inputs; of a latent problem values are the first columns of keys."""
    call = make_call(problem)
    return call._replace(v=call.k[..., : problem.value_head_dim]) if problem.mla else call


def poisoned(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=device)


def run(
    problem: Problem, call: Call, config: DecodeConfig, index_bits: int = 32, before: float = torch.nan
) -> tuple[Tensor, Tensor]:
    assert FAMILY.supports(problem, TARGET) is None
    q, k, v, side, scale = call
    out = torch.full((*q.shape[:3], v.shape[-1]), before)
    lse = torch.full(q.shape[:3], before)
    found = specialization_of((q, k, v, out), True)
    specialization = Specialization(found.alignment, max(found.index_bits, index_bits), True)
    kernel = render(FAMILY, problem, config, specialization)
    launch = bind(kernel, TARGET, ForwardTensors(q, k, v, out), side, allocate=poisoned)
    launch((q, k, v, out, lse), scale, side)
    return out, lse


def check(problem: Problem, call: Call, config: DecodeConfig, index_bits: int = 32) -> None:
    out, lse = run(problem, call, config, index_bits)
    expected_out, expected_lse = plain_attention(problem, *call)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)


def a_config(seed: str, **changes: Any) -> DecodeConfig:
    """Small tiles in any order."""
    pick = random.Random(seed)
    values: dict[str, Any] = {
        "block_m": pick.choice((16, 32)),
        "block_n": pick.choice((16, 32)),
        "num_splits": pick.choice((1, 2, 3)),
        "split_head_dim": pick.choice((False, True)),
    }
    return DecodeConfig(num_warps=4, num_stages=1, **{**values, **changes})


# Nothing is dropped where nothing is trained.
DECODED = [name for name in FEATURES if name != "dropout"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*DECODED, "plain"])
@pytest.mark.parametrize("causal", list(Causal))
def test_each_feature(name: str, causal: Causal) -> None:
    torch.manual_seed(0)
    problem = a_problem(**FEATURES.get(name, {}), causal=causal)
    check(problem, a_call(problem), a_config(f"{name} {causal}"))


def together(*names: str) -> dict[str, Any] | None:
    """The fields of several features, or None if they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        if any(asked.get(field, value) != value for field, value in FEATURES[name].items()):
            return None
        asked |= FEATURES[name]
    if asked.get("kv_lengths") and asked.get("page_size"):
        return None
    return None if "bias" in asked and "packed" in asked else asked


PAIRS = [pair for pair in itertools.combinations(DECODED, 2) if together(*pair)]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    seed = "-".join(pair)
    causal = random.Random(seed).choice(list(Causal))
    problem = a_problem(**together(*pair) or {}, causal=causal, heads=2, kv_heads=1, seqlen_kv=53)
    check(
        problem,
        a_call(problem),
        a_config(seed, block_m=32, num_splits=random.Random(seed).choice((1, 2))),
        64,
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["plain", "pages", "lengths", "packed", "window", "e4m3_head", "int8_page", "sinks"]
)
@pytest.mark.parametrize("splits", [1, 4])
def test_latent_values(name: str, splits: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(**LATENT, **FEATURES.get(name, {}), causal=Causal.BOTTOM_RIGHT)
    check(problem, a_call(problem), a_config(name, num_splits=splits))


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (12, 2), (20, 1)])
@pytest.mark.parametrize("queries", [1, 2, 5, 16])
def test_rows_of_a_tile(heads: tuple[int, int], queries: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(heads=heads[0], kv_heads=heads[1], seqlen_q=queries, causal=Causal.BOTTOM_RIGHT)
    check(problem, a_call(problem), a_config(f"{heads} {queries}"))


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 31, 33, 64, 65])
@pytest.mark.parametrize("splits", [1, 2, 5, 33])
def test_lengths_around_blocks_and_splits(keys: int, splits: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(seqlen_kv=keys, seqlen_q=1, causal=Causal.BOTTOM_RIGHT)
    check(problem, a_call(problem), a_config("", num_splits=splits, block_n=16))


@pytest.mark.parametrize("widths", [(1, 3), (8, 8), (40, 40), (96, 80), (128, 64), (64, 128), (256, 256)])
def test_head_dims(widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    problem = a_problem(head_dim=widths[0], value_head_dim=widths[1])
    for split_head_dim in (False, True):
        check(problem, a_call(problem), a_config("", num_splits=2, split_head_dim=split_head_dim))


def test_more_queries_than_keys() -> None:
    torch.manual_seed(0)
    for causal in Causal:
        problem = a_problem(seqlen_q=16, seqlen_kv=5, causal=causal, window_left=2)
        check(problem, a_call(problem), a_config("", num_splits=2))


def test_padding_does_not_affect_the_maximum() -> None:
    """If all logits are far below zero, an unmasked zero of the padding would have all probability."""
    torch.manual_seed(0)
    for splits in (1, 2, 5):
        problem = a_problem(seqlen_kv=37)
        call = a_call(problem)
        call = call._replace(q=call.q.abs(), k=-call.k.abs(), scale=8.0)
        check(problem, call, a_config("", num_splits=splits))


def test_many_packed_sequences() -> None:
    """More than a program looks at together, and among them empty ones."""
    torch.manual_seed(0)
    lengths = [(index % 4, index % 7) for index in range(150)]
    rows, keys = (sum(one[axis] for one in lengths) for axis in (0, 1))
    problem = a_problem(packed=rows, heads=2, kv_heads=1, batch=len(lengths), causal=Causal.BOTTOM_RIGHT)
    begins = [torch.tensor([0, *itertools.accumulate(one[axis] for one in lengths)]).int() for axis in (0, 1)]
    call = make_call(problem)
    q = torch.randn(1, 2, rows, problem.head_dim)
    k, v = (torch.randn(1, 1, keys, width) for width in (problem.head_dim, problem.value_head_dim))
    side = call.side._replace(cu_seqlens_q=begins[0], cu_seqlens_kv=begins[1])
    check(problem, Call(q, k, v, side), a_config("", num_splits=1, block_m=16, block_n=16))


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_after_the_last_sequence_are_not_written(splits: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(**FEATURES["packed"], causal=Causal.BOTTOM_RIGHT)
    call = a_call(problem)
    assert call.side.cu_seqlens_q is not None
    rows = int(call.side.cu_seqlens_q[-1])
    longer = call._replace(q=torch.nn.functional.pad(call.q, (0, 0, 0, 9)))
    out, lse = run(problem, longer, a_config("", num_splits=splits), before=123.0)
    assert (out[:, :, rows:] == 123.0).all()
    assert (lse[:, :, rows:] == 123.0).all()
    expected_out, expected_lse = run(problem, call, a_config("", num_splits=splits))
    assert torch.equal(out[:, :, :rows], expected_out)
    assert torch.equal(lse[:, :, :rows], expected_lse)


def test_runs_are_deterministic() -> None:
    torch.manual_seed(0)
    problem = a_problem()
    call = a_call(problem)
    first, second = (run(problem, call, a_config("", num_splits=3)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.tritons
@pytest.mark.parametrize("splits", [1, 3])
def test_rendered_module_is_standalone(splits: int) -> None:
    torch.manual_seed(0)
    problem = a_problem(
        page_size=16, softcap=True, sinks=True, alibi=True, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE
    )
    q, k, v, side, _ = a_call(problem)
    assumed = Specialization(alignment=Alignment.EIGHT, lse=True)
    kernel = render(FAMILY, problem, a_config("", num_splits=splits), assumed)
    names = [name for name, value in side._asdict().items() if value is not None]
    attention = load_module(kernel).attention
    for scale in (None, -0.5):
        out, lse = attention(q, k, v, scale, **{name: getattr(side, name) for name in names})
        expected = plain_attention(problem, q, k, v, side, 24**-0.5 if scale is None else scale)
        torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected[1], atol=2e-5, rtol=1e-5)
    assert side.seqlens_kv is not None
    sinks = side.sinks
    assert sinks is not None
    side = side._replace(seqlens_kv=torch.zeros_like(side.seqlens_kv))
    out, lse = attention(q, k, v, **{name: getattr(side, name) for name in names})
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sinks[:, None].expand_as(lse), atol=1e-5, rtol=0.0)


def test_bias_may_mask_all_keys() -> None:
    torch.manual_seed(0)
    for bias in (Bias.ADDITIVE, Bias.BOOLEAN):
        problem = a_problem(bias=bias)
        call = a_call(problem)
        assert call.side.bias is not None
        call.side.bias[:] = False if bias is Bias.BOOLEAN else -torch.inf
        out, lse = run(problem, call, a_config("", num_splits=3))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_parts_of_large_scores_count_by_their_keys(value: float) -> None:
    problem = a_problem(bias=Bias.ADDITIVE, sinks=True)
    call = a_call(problem)
    assert call.side.bias is not None
    assert call.side.sinks is not None
    bias, sinks = torch.full_like(call.side.bias, value), torch.full_like(call.side.sinks, -torch.inf)
    call = call._replace(side=call.side._replace(bias=bias, sinks=sinks))
    out, lse = run(problem, call, a_config("large", num_splits=5))
    mean = call.v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
    torch.testing.assert_close(out, mean, atol=2e-6, rtol=1e-5)
    assert (lse == value).all()
