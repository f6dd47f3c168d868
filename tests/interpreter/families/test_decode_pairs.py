"""Tests of decoding in the interpreter: eight-bit caches in pairs of columns, and the combine kernel."""

import functools
import re
from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Dtype, KvDtype, KvScale
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.compilation import load_module
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.decode_latent_hopper.space import LatentConfig
from flashtune.templates.decode_split_kv.space import DecodeConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.interpreter.families.kernel_calls import make_call
from tests.problems.plain_masks import plain_attention

TARGET = find_target("h200")
FAMILY = find_family("decode_split_kv")
IN_PTX = re.compile(
    r"tl\.inline_asm_elementwise\(\s*WIDEN,[^\[]*\[(\w+)\], \(tl\.float16, tl\.float16\), True, 2\s*\)"
)
IN_WORDS = """
@triton.jit
def halves(pairs):
    first = (pairs & 255).to(tl.uint8).to(STORED, bitcast=True)
    second = ((pairs >> 8) & 255).to(tl.uint8).to(STORED, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


"""
STORED = {KvDtype.E4M3: "tl.float8e4nv", KvDtype.INT8: "tl.int8"}


a_problem = functools.partial(
    testing.problem,
    "heads=4,kv_heads=2,seqlen_q=3,seqlen_kv=67,head_dim=64,dtype=bf16,causal,batch=2,kv_dtype=e4m3,kv_scale=head",
)


def a_config(**changes: Any) -> DecodeConfig:
    values: dict[str, Any] = {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 1, "num_splits": 2}
    return DecodeConfig(**{**values, **changes})


def in_words(kernel: Kernel, kind: KvDtype) -> Kernel:
    """The kernel with `halves` in place of the GPU's instructions, and float32 in place of fp16."""
    source, count = IN_PTX.subn(r"halves(\1)", kernel.source)
    assert count
    constant = f"STORED = tl.constexpr({STORED[kind]})\n"
    source = source.replace("\n@triton.jit", constant + IN_WORDS + "@triton.jit", 1)
    source = re.sub(r"tl\.reshape\((q_tile\w*)", r"tl.reshape(\1.to(tl.float32)", source)
    return msgspec.structs.replace(kernel, source=source.replace("tl.float16", "tl.float32"))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", list(STORED))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": Dtype.FP16},
        {"head_dim": 72, "value_head_dim": 80},
        {"head_dim": 128, "value_head_dim": 64, "softcap": True},
        {"page_size": 16, "kv_scale": KvScale.PAGE},
        {"page_size": 32, "kv_scale": KvScale.PAGE, "sinks": True},
        {"page_size": 16, "packed": 75, "batch": 5, "window_left": 9},
        {"head_dim": 128, "value_head_dim": 64, "mla": True, "kv_heads": 1},
    ],
    ids=str,
)
def test_pairs_of_columns(kind: KvDtype, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    problem = a_problem(**{**changes, "kv_dtype": kind})
    call = make_call(problem)
    own = torch.float16 if problem.dtype is Dtype.FP16 else torch.bfloat16
    scale = 0.002 if kind is KvDtype.INT8 else 0.3
    call = call._replace(q=call.q.to(own), scale=scale)
    if problem.mla:
        call = call._replace(side=call.side._replace(v_scale=call.side.k_scale))
    q, k, v, side, scale = call
    kernel = render(FAMILY, problem, a_config(), Specialization(alignment=Alignment.EIGHT, lse=True))
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=own)
    lse = torch.full(q.shape[:3], torch.nan)
    launch = bind(in_words(kernel, kind), TARGET, ForwardTensors(q, k, v, out), side)
    launch((q, k, v, out, lse), scale, side)
    expected_out, expected_lse = plain_attention(problem, *call)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)
    largest = float(expected_out.abs().max())
    torch.testing.assert_close(out.double(), expected_out, atol=0.006 * largest, rtol=0.01)


BATCH, HEADS, QUERIES, WIDTH = 2, 3, 2, 512


@pytest.mark.tritons
@pytest.mark.parametrize("splits", [2, 16, 31, 128])
def test_splits_are_weighted_by_their_sums(splits: int) -> None:
    torch.manual_seed(0)
    shape = f"heads={HEADS},kv_heads=1,head_dim=576,value_head_dim={WIDTH},batch={BATCH},mla"
    problem = testing.problem(f"{shape},seqlen_q={QUERIES},seqlen_kv={64 * splits}")
    config = LatentConfig(num_warps=4, num_stages=2, num_splits=splits)
    module = load_module(
        render(find_family("decode_latent_hopper"), problem, config, Specialization(lse=True))
    )
    rows = BATCH * HEADS * QUERIES
    parts, sums = torch.randn(splits, rows, WIDTH), 3 * torch.randn(splits, rows)
    # One row saw nothing, and others nothing in some of the parts: these were not written.
    sums[:, 5] = -torch.inf
    sums[1, ::2] = -torch.inf
    parts[sums == -torch.inf] = torch.nan
    out = torch.full((BATCH, QUERIES, HEADS, WIDTH), torch.nan).transpose(1, 2)
    lse = torch.full((BATCH, HEADS, QUERIES), torch.nan)
    q, k = torch.empty(BATCH, HEADS, QUERIES, 576), torch.empty(BATCH, 1, 64 * splits, 576)
    grid, integers = module.epilogue_plan(q, k, k[..., :WIDTH], out)
    module.combine[grid](out, lse, parts, sums, *integers)
    weights = sums.double().mul(torch.log(torch.tensor(2.0).double())).softmax(0).nan_to_num(0.0)
    expected = (weights[..., None] * parts.double().nan_to_num(0.0)).sum(0)
    torch.testing.assert_close(
        out.double(), expected.view(BATCH, HEADS, QUERIES, WIDTH), atol=1e-5, rtol=1e-5
    )
    logs = torch.logsumexp(sums.double() * torch.log(torch.tensor(2.0).double()), 0)
    torch.testing.assert_close(lse.double(), logs.view(BATCH, HEADS, QUERIES), atol=1e-5, rtol=1e-5)
