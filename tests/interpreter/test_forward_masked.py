"""Every feature of the masked family, and pairs of them, run on the CPU and compared with plain float64."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.compilation import load_module
from flashtune.features import Bias, KvDtype, KvScale
from flashtune.kernel import Specialization, specialization_of
from flashtune.launch import bind
from flashtune.problem import Causal, Dtype, Problem
from flashtune.side import Side
from flashtune.target import find_target
from flashtune.templates.forward_masked.space import MaskedConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.plain_masks import plain_attention

TARGET = find_target("h200")
FAMILY = find_family("forward_masked")
# Queries and keys of sequences that are packed or of lengths of their own: empty ones, and on borders.
LENGTHS = ((19, 40), (0, 12), (7, 0), (16, 33), (33, 17))


class Call(NamedTuple):
    """What a kernel is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    side: Side
    scale: float = 0.3


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


def make_call(problem: Problem) -> Call:
    """Tensors and side inputs of a problem: packed and paged ones have the sequences of `LENGTHS`."""
    ragged = problem.packed > 0 or problem.page_size > 0
    lengths = LENGTHS if ragged else [(problem.seqlen_q, problem.seqlen_kv)] * problem.batch
    queries, keys = ([one[axis] for one in lengths] for axis in (0, 1))
    if problem.page_size and not problem.packed:
        queries, keys = [problem.seqlen_q] * 3, keys[:3]
    if problem.lengths:
        keys = [problem.seqlen_kv - 7 * index for index in range(len(keys))]
    batch = len(keys)
    dense_q = (1, sum(queries)) if problem.packed else (batch, problem.seqlen_q)
    q = torch.randn(dense_q[0], dense_q[1], problem.heads, problem.head_dim).transpose(1, 2)
    k, v, table = make_keys(problem, keys)
    pages = k.shape[0] if problem.page_size else batch
    side = Side(
        k_scale=make_scale(problem, pages),
        v_scale=make_scale(problem, pages),
        slopes=torch.rand(batch, problem.heads) if problem.alibi else None,
        bias=make_bias(problem, batch, max(keys)),
        sinks=torch.randn(problem.heads) * 3 if problem.sinks else None,
        prefix=torch.tensor([23, 0, 5, 9, 70][:batch], dtype=torch.int32) if problem.prefix else None,
        cu_seqlens_q=starts(queries) if problem.packed else None,
        cu_seqlens_kv=starts(keys) if problem.packed and not problem.page_size else None,
        seqlens_kv=torch.tensor(keys, dtype=torch.int32) if problem.lengths or problem.page_size else None,
        block_table=table,
        seed=torch.randint(2**63 - 1, (1,)) if problem.dropout else None,
        softcap=1.5 if problem.softcap else None,
        dropout=0.3 if problem.dropout else None,
    )
    return Call(q, k, v, side)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def stored(problem: Problem, *shape: int) -> Tensor:
    if problem.kv_dtype is KvDtype.INT8:
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    values = torch.randn(shape)
    return values.to(torch.float8_e4m3fn) if problem.kv_dtype is KvDtype.E4M3 else values


def unused(problem: Problem, *shape: int) -> Tensor:
    """What lies where no sequence has keys: what would show in any sum."""
    if problem.kv_dtype is KvDtype.INT8:
        return torch.full(shape, 127, dtype=torch.int8)
    nothing = torch.full(shape, torch.nan)
    return nothing.to(torch.float8_e4m3fn) if problem.kv_dtype is KvDtype.E4M3 else nothing


def make_keys(problem: Problem, keys: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v, and of pages the block table, whose entries beyond a sequence's pages point nowhere."""
    widths = (problem.head_dim, problem.value_head_dim)
    heads = problem.kv_heads
    if problem.page_size:
        return make_pages(problem, keys)
    if problem.packed:
        k, v = (stored(problem, 1, sum(keys), heads, width).transpose(1, 2) for width in widths)
        return k, v, None
    # Keys behind the lengths on the device are there, and no sequence's.
    k, v = (unused(problem, len(keys), heads, problem.seqlen_kv, width) for width in widths)
    for index, length in enumerate(keys):
        k[index, :, :length] = stored(problem, heads, length, widths[0])
        v[index, :, :length] = stored(problem, heads, length, widths[1])
    return k, v, None


def make_pages(problem: Problem, keys: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    size, heads = problem.page_size, problem.kv_heads
    counts = [-(-length // size) for length in keys]
    order = torch.randperm(sum(counts) + 3)
    widths = (problem.head_dim, problem.value_head_dim)
    # Positions before heads in a page, as vLLM has them, or heads first.
    shapes = [(len(order), size, heads, width) for width in widths]
    k, v = (unused(problem, *shape).transpose(1, 2) for shape in shapes)
    if problem.head_dim % 16:
        k, v = k.contiguous(), v.contiguous()
    table = torch.full((len(keys), max(counts) + 2), 2**30, dtype=torch.int32)
    used = iter(order.tolist())
    for index, (length, count) in enumerate(zip(keys, counts, strict=True)):
        for place in range(count):
            page = next(used)
            table[index, place] = page
            filled = min(size, length - place * size)
            k[page, :, :filled] = stored(problem, heads, filled, widths[0])
            v[page, :, :filled] = stored(problem, heads, filled, widths[1])
    return k, v, table


def make_scale(problem: Problem, first: int) -> Tensor | None:
    if problem.kv_dtype is None:
        return None
    unit = 2.0**-6 if problem.kv_dtype is KvDtype.INT8 else 1.0
    if problem.kv_scale is KvScale.TENSOR:
        return torch.tensor([[0.75 * unit]]).expand(first, problem.kv_heads)
    if problem.kv_scale is KvScale.HEAD:
        return (unit * (0.5 + torch.rand(1, problem.kv_heads))).expand(first, problem.kv_heads)
    return unit * 2.0 ** torch.randint(-2, 3, (first, problem.kv_heads))


def make_bias(problem: Problem, batch: int, keys: int) -> Tensor | None:
    shape = (batch, problem.heads, problem.seqlen_q, keys)
    if problem.bias is Bias.NONE:
        return None
    if problem.bias is Bias.ADDITIVE:
        bias = torch.randn(shape)
        bias[torch.rand(shape) < 0.3] = -torch.inf
    else:
        bias = torch.rand(shape) < 0.6
    # Rows and blocks that nobody sees, the first of a row among them.
    bias[:, 0, 3:9] = False if problem.bias is Bias.BOOLEAN else -torch.inf
    bias[..., :20] = False if problem.bias is Bias.BOOLEAN else -torch.inf
    return bias


def check(problem: Problem, call: Call, config: MaskedConfig, index_bits: int = 32) -> None:
    assert FAMILY.supports(problem, TARGET) is None
    q, k, v, side, scale = call
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    found = specialization_of((q, k, v, out), True)
    specialization = Specialization(found.alignment, max(found.index_bits, index_bits), True)
    kernel = render(FAMILY, problem, config, specialization)
    bind(kernel, TARGET, q, k, v, out, side)(q, k, v, out, lse, scale, side)
    expected_out, expected_lse = plain_attention(problem, q, k, v, side, scale)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)


def a_config(seed: str, *, two_phases: bool) -> MaskedConfig:
    """Small tiles in any order."""
    pick = random.Random(seed)
    return MaskedConfig(
        block_m=pick.choice((16, 32)),
        block_n=pick.choice((16, 32)),
        num_warps=4,
        num_stages=1,
        two_phases=two_phases,
        decomposed=pick.choice((False, True)),
        long_first=pick.choice((False, True)),
        heads_inner=pick.choice((False, True)),
    )


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 11},
    "window_right": {"window_left": 21, "window_right": 6},
    "right_alone": {"window_right": 3},
    "wide_window": {"window_left": 2**31 - 1, "window_right": 2**31 - 1},
    "first_tokens": {"window_left": 9, "first_tokens": 4},
    "chunk": {"chunk": 16},
    "odd_chunk": {"chunk": 13, "first_tokens": 18},
    "prefix": {"prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "packed": {"packed": 75},
    "lengths": {"lengths": True},
    "pages": {"page_size": 16},
    "large_pages": {"page_size": 64},
    "int8_tensor": {"kv_dtype": KvDtype.INT8},
    "e4m3_head": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD},
    "int8_page": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE, "page_size": 32},
    "e4m3_page": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "page_size": 16},
}
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


def combined(*names: str, **changes: Any) -> Problem | None:
    """A problem of several features, or None where they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        for field, value in FEATURES[name].items():
            if asked.setdefault(field, value) != value:
                return None
    if asked.get("page_size") and asked.get("lengths"):
        return None
    problem = a_problem(**asked, **changes)
    return None if FAMILY.supports(problem, TARGET) else problem


@pytest.mark.parametrize("name", FEATURES)
@CAUSAL
def test_each_feature(name: str, causal: Causal) -> None:
    torch.manual_seed(0)
    problem = combined(name, causal=causal, heads=3, kv_heads=3 if causal is Causal.NONE else 1)
    assert problem is not None
    check(problem, make_call(problem), a_config(f"{name} {causal}", two_phases=True))


PAIRS = list(itertools.combinations(FEATURES, 2))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    seed = "-".join(pair)
    pick = random.Random(seed)
    problem = combined(*pair, causal=pick.choice(list(Causal)), head_dim=32)
    if problem is None:
        assert contradict(pair)
        return
    check(problem, make_call(problem), a_config(seed, two_phases=pick.choice((True, False))), 64)


def contradict(pair: tuple[str, str]) -> bool:
    """Whether no problem asks for both: two values of one field, or a bias over packed sequences."""
    one, other = (FEATURES[name] for name in pair)
    clash = any(field in other and other[field] != value for field, value in one.items())
    both = {**one, **other}
    biased = "bias" in both and "packed" in both
    return clash or biased or ("page_size" in both and "lengths" in both)


@pytest.mark.parametrize("cap", [0.05, 1.0, 50.0, 3000.0])
def test_a_cap_keeps_the_digits_of_float32(cap: float) -> None:
    """Scores from far below to far above the cap, both signs: the log-sum-exp of one key is its score."""
    problem = a_problem(softcap=True, batch=1, heads=1, seqlen_q=64, seqlen_kv=1, head_dim=16)
    sizes = cap * torch.logspace(-5, 1.5, 32)
    q = torch.zeros(1, 1, 64, 16)
    q[0, 0, :, 0] = torch.cat([sizes, -sizes])
    k = torch.zeros(1, 1, 1, 16)
    k[..., 0] = 1.0
    out, lse = torch.empty(1, 1, 64, 16), torch.empty(1, 1, 64)
    side = Side(softcap=cap)
    kernel = render(FAMILY, problem, a_config("cap", two_phases=True), Specialization(lse=True))
    bind(kernel, TARGET, q, k, k, out, side)(q, k, k, out, lse, 1.0, side)
    expected = cap * torch.tanh(q[0, 0, :, 0].double() / cap)
    # A few units in the last place, near zero as anywhere else.
    assert ((lse[0, 0].double() - expected).abs() / expected.abs()).max() < 1e-6


def test_more_sequences_than_one_step_searches_are_found() -> None:
    """More sequences than one search step covers, most of them empty or of one query."""
    torch.manual_seed(0)
    lengths = [index % 3 if index % 40 else 35 for index in range(300)]
    problem = a_problem(packed=sum(lengths), heads=1, causal=Causal.BOTTOM_RIGHT, head_dim=16)
    packed = starts(lengths)
    q, k, v = (torch.randn(1, 1, sum(lengths), 16) for _ in range(3))
    side = Side(cu_seqlens_q=packed, cu_seqlens_kv=packed)
    config = msgspec.structs.replace(a_config("many", two_phases=True), block_m=32, block_n=32)
    check(problem, Call(q, k, v, side), config)


@pytest.mark.parametrize("name", ["window_right", "packed", "e4m3_page", "additive", "softcap", "dropout"])
def test_the_rendered_file_works_alone(name: str) -> None:
    """`attention` of the rendered module takes what it needs by name, and a negative scale."""
    torch.manual_seed(0)
    problem = combined(name, causal=Causal.TOP_LEFT)
    assert problem is not None
    q, k, v, side, _ = make_call(problem)
    kernel = render(FAMILY, problem, a_config(name, two_phases=True), Specialization(lse=True))
    given = {field: getattr(side, field) for field in kernel.side}
    for scale in (None, -0.5):
        out, lse = load_module(kernel).attention(q, k, v, scale, **given)
        wanted = plain_attention(problem, q, k, v, side, problem.head_dim**-0.5 if scale is None else scale)
        torch.testing.assert_close(out.double(), wanted[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), wanted[1], atol=2e-5, rtol=1e-5)
    empty, _ = load_module(kernel).attention(q[:, :, :0], k, v, **given)
    assert empty.shape == (*q.shape[:2], 0, problem.value_head_dim)


def test_plain_masks_agree_with_torch() -> None:
    """What the kernels are held against, beside SDPA's own mask."""
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
