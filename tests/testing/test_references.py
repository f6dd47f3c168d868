"""Tests of `flashtune.testing` on unfused attention, torch's SDPA and wrong results."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune import testing
from flashtune.runtime.unfused import unfused_attention
from tests.problems.features import paged
from tests.support.values import present

SHAPE = "heads=4,kv_heads=2,seqlen=70,head_dim=32,batch=3"
FEATURES = (
    "",
    "causal",
    "window=20,causal",
    "window=10,sink_tokens=3,causal",
    "chunk=32,causal",
    "softcap",
    "alibi",
    "bias=additive",
    "bias=boolean",
    "sinks,causal",
    "prefix,causal",
    "block_mask=64",
    "dropout",
    "kv_lengths",
    "packed=150",
    "packed=150,causal,dropout",
)
CACHES = (
    "page_size=16",
    "page_size=16,kv_dtype=e4m3,kv_scale=page",
    "packed=150,page_size=16,causal",
    "kv_dtype=int8,kv_scale=head",
)


def wide(*shape: int) -> Tensor:
    """Float64 tensors, which flashtune computes without a GPU."""
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("features", [*FEATURES, *CACHES])
def test_unfused_attention_is_close(features: str) -> None:
    inputs = testing.tensors(testing.problem(f"{SHAPE},{features}"), seed=1)
    out, lse = unfused_attention(
        inputs.problem, inputs.q, inputs.k, inputs.v, inputs.extra, scale=inputs.scale, return_lse=True
    )
    expected = testing.reference(inputs)
    assert 0 < testing.close(out, expected.out) <= 1
    testing.close(present(lse), expected.lse)


@pytest.mark.parametrize("features", FEATURES)
def test_gradients_of_unfused_attention_are_close(features: str) -> None:
    problem = testing.problem(f"{SHAPE},{features},dtype=fp32,backward")
    inputs = testing.tensors(problem, dlse=True)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in "qkv"}
    extra = inputs.extra
    for name in ("slopes", "sinks", *(("bias",) if problem.bias == "additive" else ())):
        if getattr(extra, name) is not None:
            leaves[name] = getattr(extra, name).requires_grad_()
    arguments = (inputs.q.double(), inputs.k.double(), inputs.v.double())
    out, lse = unfused_attention(inputs.problem, *arguments, extra, scale=inputs.scale, return_lse=True)
    assert lse is not None
    seen = ~lse.isneginf()
    loss = (out * present(inputs.dout)).sum() + (lse[seen] * present(inputs.dlse)[seen]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    expected = testing.reference(inputs)
    for name, gradient in zip(leaves, gradients, strict=True):
        exact = getattr(expected, f"d{name}")
        if name == "sinks":
            # Kernels give the gradient of each sequence.
            exact = exact._replace(exact=exact.exact.sum(0), allowed=exact.allowed.sum(0))
        testing.close(gradient, exact)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_reference_of_a_call_is_torchs_attention(layout: str) -> None:
    q, k = wide(2, 40, 4, 16), wide(2, 40, 2, 16)
    v = wide(2, 40, 2, 24)
    if layout == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    inputs = testing.attention_inputs(q, k, v, causal=True, layout=layout)
    exact = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=True)
    expected = testing.reference(inputs)
    torch.testing.assert_close(expected.out.exact, inputs.layout.as_given(exact))
    out, lse = flashtune.attention(q, k, v, causal=True, layout=layout, return_lse=True)  # type: ignore[call-overload]
    testing.close(out, expected.out)
    testing.close(lse, expected.lse)


def test_references_of_packed_and_paged_calls_have_their_layouts() -> None:
    q, k, v = (wide(30, heads, 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    call: tuple[Any, ...] = (q, k, v, starts, starts, 23, 23)
    out, lse = flashtune.attention_varlen(*call, causal=True, return_lse=True)
    expected = testing.reference(testing.varlen_inputs(*call, causal=True))
    testing.close(out, expected.out)
    testing.close(lse, expected.lse)
    cache = paged()
    cache = cache._replace(k_cache=cache.k_cache.double(), v_cache=cache.v_cache.double())
    q = wide(5, 4, 32)
    out, lse = flashtune.attention_paged(q, *cache, return_lse=True)
    expected = testing.reference(testing.paged_inputs(q, *cache))
    testing.close(out, expected.out)
    testing.close(lse, expected.lse)


def test_sequences_without_keys_give_zeros() -> None:
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 0, 16)
    expected = testing.reference(testing.attention_inputs(q, k, k))
    assert not expected.out.exact.any()
    assert expected.lse.exact.isneginf().all()


def test_no_queries_give_empty_results() -> None:
    q, starts = torch.randn(0, 2, 16), torch.zeros(2, dtype=torch.int32)
    expected = testing.reference(testing.varlen_inputs(q, q, q, starts, starts, 0, 0))
    assert (expected.out.exact.shape, expected.lse.exact.shape) == ((0, 2, 16), (2, 0))
    assert testing.close(q, expected.out) == 0.0


@pytest.mark.parametrize(
    ("value", "message"),
    [(1.0, r"^out\[1, 2, 3, 4\] is .* times the tolerance"), (float("nan"), r"^out\[1, 2, 3, 4\] is nan")],
)
def test_errors_name_the_element(value: float, message: str) -> None:
    expected = testing.reference(testing.tensors(testing.problem(SHAPE))).out
    wrong = expected.exact.clone()
    wrong[1, 2, 3, 4] += value
    with pytest.raises(AssertionError, match=message):
        testing.close(wrong, expected)
    with pytest.raises(AssertionError, match="pass a tensor of the same layout"):
        testing.close(wrong.transpose(1, 2), expected)


def test_wrong_mask_is_found() -> None:
    inputs = testing.tensors(testing.problem(f"{SHAPE},causal"), probe="needle")
    out = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, scale=inputs.scale, enable_gqa=True)
    with pytest.raises(AssertionError):
        testing.close(out, testing.reference(inputs).out)


def test_inputs_depend_on_the_seed_only() -> None:
    problem = testing.problem(SHAPE)
    first, same, other = (testing.tensors(problem, seed=seed).q for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_import_needs_no_pytest() -> None:
    code = "import sys, flashtune.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
