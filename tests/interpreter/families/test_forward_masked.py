"""Tests of features of the masked family in the interpreter, against float64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Specialization, specialization_of
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.compilation import load_module
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.forward_masked.space import MaskedConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.interpreter.families.masked_calls import FEATURES, Call, make_call, starts
from tests.problems.plain_masks import plain_attention

TARGET = find_target("h200")
FAMILY = find_family("forward_masked")
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.FP32,
        head_dim=24,
        value_head_dim=16,
        heads=2,
        kv_heads=1,
        batch=2,
        seqlen_q=35,
        seqlen_kv=53,
    )
    return msgspec.structs.replace(problem, **changes)


def check(problem: Problem, call: Call, config: MaskedConfig, index_bits: int = 32) -> None:
    assert FAMILY.supports(problem, TARGET) is None
    q, k, v, side, scale = call
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    found = specialization_of((q, k, v, out), True)
    specialization = Specialization(found.alignment, max(found.index_bits, index_bits), True)
    kernel = render(FAMILY, problem, config, specialization)
    bind(kernel, TARGET, ForwardTensors(q, k, v, out), side)((q, k, v, out, lse), scale, side)
    expected_out, expected_lse = plain_attention(problem, q, k, v, side, scale)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)


def a_config(seed: str, *, split_masked_loop: bool) -> MaskedConfig:
    """Small tiles in any order."""
    pick = random.Random(seed)
    return MaskedConfig(
        block_m=pick.choice((16, 32)),
        block_n=pick.choice((16, 32)),
        num_warps=4,
        num_stages=1,
        split_masked_loop=split_masked_loop,
        split_head_dim=pick.choice((False, True)),
        lpt=pick.choice((False, True)),
        heads_innermost=pick.choice((False, True)),
    )


def combined(*names: str, **changes: Any) -> Problem | None:
    """A problem of several features, or None where they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        for field, value in FEATURES[name].items():
            if asked.setdefault(field, value) != value:
                return None
    if asked.get("page_size") and asked.get("kv_lengths"):
        return None
    problem = a_problem(**asked, **changes)
    return None if FAMILY.supports(problem, TARGET) else problem


@pytest.mark.sampled
@pytest.mark.parametrize("name", FEATURES)
@CAUSAL
def test_each_feature(name: str, causal: Causal) -> None:
    torch.manual_seed(0)
    problem = combined(name, causal=causal, heads=3, kv_heads=3 if causal is Causal.NONE else 1)
    assert problem is not None
    check(problem, make_call(problem), a_config(f"{name} {causal}", split_masked_loop=True))


PAIRS = list(itertools.combinations(FEATURES, 2))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    seed = "-".join(pair)
    pick = random.Random(seed)
    problem = combined(*pair, causal=pick.choice(list(Causal)), head_dim=32)
    if problem is None:
        assert contradict(pair)
        return
    check(problem, make_call(problem), a_config(seed, split_masked_loop=pick.choice((True, False))), 64)


def contradict(pair: tuple[str, str]) -> bool:
    """Whether no problem has both: two values of one field, or a bias with packed sequences."""
    one, other = (FEATURES[name] for name in pair)
    clash = any(field in other and other[field] != value for field, value in one.items())
    both = {**one, **other}
    biased = "bias" in both and "packed" in both
    return clash or biased or ("page_size" in both and "kv_lengths" in both)


@pytest.mark.parametrize("cap", [0.05, 1.0, 50.0, 3000.0])
def test_softcap_has_float32_precision(cap: float) -> None:
    """Scores from far below to far above the cap, both signs: the log-sum-exp of one key is its score."""
    problem = a_problem(softcap=True, batch=1, heads=1, seqlen_q=64, seqlen_kv=1, head_dim=16)
    sizes = cap * torch.logspace(-5, 1.5, 32)
    q = torch.zeros(1, 1, 64, 16)
    q[0, 0, :, 0] = torch.cat([sizes, -sizes])
    k = torch.zeros(1, 1, 1, 16)
    k[..., 0] = 1.0
    out, lse = torch.empty(1, 1, 64, 16), torch.empty(1, 1, 64)
    side = ExtraInputs(softcap=cap)
    kernel = render(FAMILY, problem, a_config("cap", split_masked_loop=True), Specialization(lse=True))
    bind(kernel, TARGET, ForwardTensors(q, k, k, out), side)((q, k, k, out, lse), 1.0, side)
    expected = cap * torch.tanh(q[0, 0, :, 0].double() / cap)
    # A few units in the last place, near zero as anywhere else.
    assert ((lse[0, 0].double() - expected).abs() / expected.abs()).max() < 1e-6


def test_many_sequences_are_found_in_several_search_steps() -> None:
    """More sequences than one search step covers, most of them empty or of one query."""
    torch.manual_seed(0)
    lengths = [index % 3 if index % 40 else 35 for index in range(300)]
    problem = a_problem(packed=sum(lengths), heads=1, causal=Causal.BOTTOM_RIGHT, head_dim=16)
    packed = starts(lengths)
    q, k, v = (torch.randn(1, 1, sum(lengths), 16) for _ in range(3))
    side = ExtraInputs(cu_seqlens_q=packed, cu_seqlens_kv=packed)
    config = msgspec.structs.replace(a_config("many", split_masked_loop=True), block_m=32, block_n=32)
    check(problem, Call(q, k, v, side), config)


@pytest.mark.tritons
@pytest.mark.parametrize("name", ["window_right", "packed", "e4m3_page", "additive", "softcap", "dropout"])
def test_rendered_module_is_standalone(name: str) -> None:
    """`attention` of the rendered module accepts extra inputs by name, and a negative scale."""
    torch.manual_seed(0)
    problem = combined(name, causal=Causal.TOP_LEFT)
    assert problem is not None
    q, k, v, side, _ = make_call(problem)
    kernel = render(
        FAMILY, problem, a_config(name, split_masked_loop=True), Specialization(Alignment.ANY, lse=True)
    )
    given = {field: getattr(side, field) for field in kernel.side}
    for scale in (None, -0.5):
        out, lse = load_module(kernel).attention(q, k, v, scale, **given)
        wanted = plain_attention(problem, q, k, v, side, problem.head_dim**-0.5 if scale is None else scale)
        torch.testing.assert_close(out.double(), wanted[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), wanted[1], atol=2e-5, rtol=1e-5)
    if "bias" in given:
        given["bias"] = given["bias"][:, :, :0]
    empty, _ = load_module(kernel).attention(q[:, :, :0], k, v, **given)
    assert empty.shape == (*q.shape[:2], 0, problem.value_head_dim)


def test_plain_masks_agree_with_torch() -> None:
    """Compares the reference with SDPA's own mask."""
    torch.manual_seed(0)
    problem = a_problem(causal=Causal.BOTTOM_RIGHT, window_left=9, bias=Bias.BOOLEAN, heads=4, kv_heads=2)
    q, k, v, side, scale = make_call(problem)
    assert side.bias is not None
    side.bias[..., 20:30] = True
    place, key = torch.arange(35)[:, None] + 18, torch.arange(53)[None, :]
    mask = side.bias & (key <= place) & (key >= place - 9)
    out, lse = plain_attention(problem, q, k, v, side, scale)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale, enable_gqa=True
    )
    sees = mask.any(-1)
    torch.testing.assert_close(out[sees], wanted[sees])
    assert torch.equal(lse == -torch.inf, ~sees)
    assert sees.any()
    assert not sees.all()
