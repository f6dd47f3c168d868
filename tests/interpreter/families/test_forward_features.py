"""Tests of features of the masked and the split-KV family in the interpreter, against float64."""

import itertools
import random
from typing import Any

import pytest
import torch

from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Bias, Causal, KvDtype, KvScale, Problem
from flashtune.templates.common.model.splits import can_split
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from tests.interpreter.families.kernel_calls import (
    SHORT_STEPS,
    Call,
    a_problem,
    check,
    make_call,
    run,
    small_config,
    standalone,
    together,
)
from tests.problems.features import starts
from tests.problems.kernel_cases import FORWARD
from tests.problems.plain_masks import plain_attention

MASKED, DECODING = (find_family(name) for name in ("forward_masked", "decode_split_kv"))
LATENT = {"mla": True, "head_dim": 40, "value_head_dim": 32, "heads": 5, "kv_heads": 1}
# Nothing is dropped where nothing is trained.
NAMES = [(MASKED, name) for name in FORWARD] + [(DECODING, name) for name in FORWARD if name != "dropout"]
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


def id_of(value: object) -> str | None:
    return getattr(value, "name", None)


def few_queries(**changes: Any) -> Problem:
    return a_problem(**{"heads": 4, "kv_heads": 2, "seqlen_q": 3, "seqlen_kv": 67, **changes})


def problem_of(family: Family, **changes: Any) -> Problem:
    return a_problem(**changes) if family is MASKED else few_queries(**changes)


def masked_config(problem: Problem, seed: str, sides: tuple[int, ...] = (16, 32), **changes: Any) -> Config:
    whole = {} if can_split(problem) else {"num_splits": 1}
    return small_config(MASKED, seed, sides, **whole, **changes)


def check_decoding(problem: Problem, seed: str = "", **config: Any) -> None:
    torch.manual_seed(0)
    check(DECODING, problem, make_call(problem), small_config(DECODING, seed, **config))


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "name"), [*NAMES, (DECODING, "plain")], ids=id_of)
@CAUSAL
def test_each_feature(family: Family, name: str, causal: Causal) -> None:
    torch.manual_seed(0)
    heads = {"heads": 3, "kv_heads": 3 if causal is Causal.NONE else 1} if family is MASKED else {}
    problem = problem_of(family, **heads, **FORWARD.get(name, {}), causal=causal)
    # Blocks that no mask touches have a loop of their own.
    seed = f"{name} {causal}"
    if family is MASKED:
        config = masked_config(problem, seed, split_masked_loop=True)
    else:
        config = small_config(family, seed)
    check(family, problem, make_call(problem), config)


PAIRS = [
    (family, pair)
    for family in (MASKED, DECODING)
    for pair in itertools.combinations([name for own, name in NAMES if own is family], 2)
    if together(*pair)
]


@pytest.mark.sampled(every=18)
@pytest.mark.parametrize(
    ("family", "pair"), [pytest.param(*row, id="-".join((row[0].name, *row[1]))) for row in PAIRS]
)
def test_pairs_of_features(family: Family, pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    seed = "-".join(pair)
    shape = {"head_dim": 32} if family is MASKED else {"heads": 2, "kv_heads": 1, "seqlen_kv": 53}
    causal = random.Random(seed).choice(list(Causal))
    problem = problem_of(family, **together(*pair) or {}, **shape, causal=causal)
    if family is MASKED:
        config = masked_config(problem, seed)
    else:
        config = small_config(family, seed, block_m=32, num_splits=random.Random(seed).choice((1, 2)))
    check(family, problem, make_call(problem), config, index_bits=64)


@pytest.mark.parametrize("cap", [0.05, 1.0, 50.0, 3000.0])
def test_softcap_has_float32_precision(cap: float) -> None:
    """Scores from far below to far above the cap, both signs: the log-sum-exp of one key is its score."""
    problem = a_problem(softcap=True, batch=1, heads=1, seqlen_q=64, seqlen_kv=1, head_dim=16)
    sizes = cap * torch.logspace(-5, 1.5, 32)
    q = torch.zeros(1, 1, 64, 16)
    q[0, 0, :, 0] = torch.cat([sizes, -sizes])
    k = torch.zeros(1, 1, 1, 16)
    k[..., 0] = 1.0
    call = Call(q, k, k, ExtraInputs(softcap=cap), 1.0)
    _, lse = run(MASKED, problem, call, small_config(MASKED, "cap", split_masked_loop=True))
    expected = cap * torch.tanh(q[0, 0, :, 0].double() / cap)
    # A few units in the last place, near zero as anywhere else.
    assert ((lse[0, 0].double() - expected).abs() / expected.abs()).max() < 1e-6


@pytest.mark.parametrize("family", [MASKED, DECODING], ids=id_of)
def test_many_sequences_are_found_in_several_search_steps(family: Family) -> None:
    """More sequences than one search step covers, most of them empty or of one query."""
    torch.manual_seed(0)
    if family is MASKED:
        queries = keys = tuple(index % 3 if index % 13 else 35 for index in range(38))
        sides = (32, 32)
    else:
        queries, keys = (tuple(index % count for index in range(38)) for count in (4, 7))
        sides = (16, 16)
    shape = {"packed": sum(queries), "batch": len(queries), "heads": 2, "kv_heads": 1}
    problem = problem_of(family, **shape, causal=Causal.BOTTOM_RIGHT, head_dim=16)
    q = torch.randn(1, 2, sum(queries), 16)
    k, v = (torch.randn(1, 1, sum(keys), 16) for _ in range(2))
    side = ExtraInputs(cu_seqlens_q=starts(queries), cu_seqlens_kv=starts(keys))
    changes: dict[str, Any] = {} if family is MASKED else {"num_splits": 1}
    config = small_config(family, "many", sides, **changes)
    check(family, problem, Call(q, k, v, side), config, instead=SHORT_STEPS)


@pytest.mark.tritons
@pytest.mark.parametrize("name", ["packed", "e4m3_page", "additive", "dropout"])
def test_rendered_module_is_standalone(name: str) -> None:
    """`attention` of the rendered module accepts extra inputs by name, and a negative scale."""
    torch.manual_seed(0)
    problem = a_problem(**FORWARD[name], causal=Causal.TOP_LEFT)
    call = make_call(problem)
    q, k, v, side, _ = call
    attention = standalone(MASKED, problem, call, masked_config(problem, name, split_masked_loop=True))
    extra = {field: value for field, value in side._asdict().items() if value is not None}
    if side.bias is not None:
        extra["bias"] = side.bias[:, :, :0]
    empty, _ = attention(q[:, :, :0], k, v, **extra)
    assert empty.shape == (*q.shape[:2], 0, problem.value_head_dim)
    if name in ("additive", "dropout"):
        extra |= {} if side.bias is None else {"bias": side.bias[..., :0]}
        out, lse = attention(q, k[:, :, :0], v[:, :, :0], **extra)
        assert not out.any()
        assert lse.isneginf().all()


@pytest.mark.tritons
@pytest.mark.parametrize("splits", [1, 3])
def test_rendered_decoding_module_is_standalone(splits: int) -> None:
    torch.manual_seed(0)
    problem = few_queries(
        page_size=16, softcap=True, sinks=True, alibi=True, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE
    )
    call = make_call(problem)
    config = small_config(DECODING, "", num_splits=splits)
    attention = standalone(DECODING, problem, call, config, Alignment.EIGHT)
    q, k, v, side, _ = call
    sinks = side.sinks
    assert side.seqlens_kv is not None
    assert sinks is not None
    side = side._replace(seqlens_kv=torch.zeros_like(side.seqlens_kv))
    extra = {name: value for name, value in side._asdict().items() if value is not None}
    out, lse = attention(q, k, v, **extra)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sinks[:, None].expand_as(lse), atol=1e-5, rtol=0.0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["plain", "pages", "lengths", "packed", "window", "e4m3_head", "int8_page", "sinks"]
)
@pytest.mark.parametrize("splits", [1, 4])
def test_latent_values(name: str, splits: int) -> None:
    problem = few_queries(**{**LATENT, **FORWARD.get(name, {})}, causal=Causal.BOTTOM_RIGHT)
    check_decoding(problem, name, num_splits=splits)


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (12, 2), (20, 1)])
@pytest.mark.parametrize("queries", [1, 2, 5, 16])
def test_rows_of_a_tile(heads: tuple[int, int], queries: int) -> None:
    problem = few_queries(heads=heads[0], kv_heads=heads[1], seqlen_q=queries, causal=Causal.BOTTOM_RIGHT)
    check_decoding(problem, f"{heads} {queries}")


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 31, 33, 64, 65])
@pytest.mark.parametrize("splits", [1, 2, 5, 33])
def test_lengths_around_blocks_and_splits(keys: int, splits: int) -> None:
    problem = few_queries(seqlen_kv=keys, seqlen_q=1, causal=Causal.BOTTOM_RIGHT)
    check_decoding(problem, num_splits=splits, block_n=16)


@pytest.mark.parametrize("widths", [(1, 3), (8, 8), (40, 40), (96, 80), (128, 64), (64, 128), (256, 256)])
def test_head_dims(widths: tuple[int, int]) -> None:
    problem = few_queries(head_dim=widths[0], value_head_dim=widths[1])
    for split_head_dim in (False, True):
        check_decoding(problem, num_splits=2, split_head_dim=split_head_dim)


@CAUSAL
def test_more_queries_than_keys(causal: Causal) -> None:
    check_decoding(few_queries(seqlen_q=16, seqlen_kv=5, causal=causal, window_left=2), num_splits=2)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_padding_does_not_affect_the_maximum(splits: int) -> None:
    """If all logits are far below zero, an unmasked zero of the padding would have all probability."""
    torch.manual_seed(0)
    problem = few_queries(seqlen_kv=37)
    call = make_call(problem)
    call = call._replace(q=call.q.abs(), k=-call.k.abs(), scale=8.0)
    check(DECODING, problem, call, small_config(DECODING, "", num_splits=splits))


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_after_the_last_sequence_are_not_written(splits: int) -> None:
    torch.manual_seed(0)
    problem = few_queries(**FORWARD["packed"], causal=Causal.BOTTOM_RIGHT)
    call = make_call(problem)
    assert call.side.cu_seqlens_q is not None
    rows = int(call.side.cu_seqlens_q[-1])
    longer = call._replace(q=torch.nn.functional.pad(call.q, (0, 0, 0, 9)))
    config = small_config(DECODING, "", num_splits=splits)
    out, lse = run(DECODING, problem, longer, config, before=123.0)
    assert (out[:, :, rows:] == 123.0).all()
    assert (lse[:, :, rows:] == 123.0).all()
    expected_out, expected_lse = run(DECODING, problem, call, config)
    assert torch.equal(out[:, :, :rows], expected_out)
    assert torch.equal(lse[:, :, :rows], expected_lse)


@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
def test_bias_may_mask_all_keys(bias: Bias) -> None:
    torch.manual_seed(0)
    problem = few_queries(bias=bias)
    call = make_call(problem)
    assert call.side.bias is not None
    hiding = torch.full_like(call.side.bias, False if bias is Bias.BOOLEAN else -torch.inf)
    call = call._replace(side=call.side._replace(bias=hiding))
    out, lse = run(DECODING, problem, call, small_config(DECODING, "", num_splits=3))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_parts_of_large_scores_count_by_their_keys(value: float) -> None:
    problem = few_queries(bias=Bias.ADDITIVE, sinks=True)
    call = make_call(problem)
    assert call.side.bias is not None
    assert call.side.sinks is not None
    bias, sinks = torch.full_like(call.side.bias, value), torch.full_like(call.side.sinks, -torch.inf)
    call = call._replace(side=call.side._replace(bias=bias, sinks=sinks))
    out, lse = run(DECODING, problem, call, small_config(DECODING, "large", num_splits=5))
    mean = call.v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
    torch.testing.assert_close(out, mean, atol=2e-6, rtol=1e-5)
    assert (lse == value).all()


def test_plain_masks_agree_with_torch() -> None:
    """Compares the reference with SDPA's own mask."""
    torch.manual_seed(0)
    problem = a_problem(causal=Causal.BOTTOM_RIGHT, window_left=9, bias=Bias.BOOLEAN, heads=4, kv_heads=2)
    q, k, v, side, scale = make_call(problem)
    assert side.bias is not None
    side.bias[..., 20:30] = True
    position, key = torch.arange(35)[:, None] + 18, torch.arange(53)[None, :]
    mask = side.bias & (key <= position) & (key >= position - 9)
    out, lse = plain_attention(problem, q, k, v, side, scale)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale, enable_gqa=True
    )
    sees = mask.any(-1)
    torch.testing.assert_close(out[sees], wanted[sees])
    assert torch.equal(lse == -torch.inf, ~sees)
    assert sees.any()
    assert not sees.all()
