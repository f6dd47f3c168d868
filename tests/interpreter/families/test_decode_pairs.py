"""Eight-bit caches that are read two columns at a time, on the CPU.

The interpreter cannot run instructions of the GPU and products in 16 bits: the tests replace them.
"""

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
from flashtune.launch.tensors import ForwardTensors
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
