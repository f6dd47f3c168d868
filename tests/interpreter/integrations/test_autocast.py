"""Tests of calls under `torch.autocast`, against SDPA and against calls with tensors that were cast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.integrations.flash_attn import flash_attn_2

Call = Callable[..., Tensor]
BF16 = torch.bfloat16
STARTS = torch.tensor([0, 9, 20], dtype=torch.int32)


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    out: Tensor = flashtune.attention_varlen(q, k, v, STARTS, STARTS, 11, 11, **options)
    return out


def paged(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    table = torch.arange(2, dtype=torch.int32)[None]
    # Pages of 16 rows, of which the sequence has 20.
    pages = (torch.nn.functional.pad(tensor[0], (0, 0, 0, 12)).unflatten(1, (2, 16)) for tensor in (k, v))
    k, v = (tensor.transpose(0, 1) for tensor in pages)
    lengths = torch.tensor([20], dtype=torch.int32)
    q = q.transpose(1, 2)
    out: Tensor = flashtune.attention_paged(q, k, v, table, lengths, layout="hnd", **options)
    return out


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = flash_attn_2.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor)
    return out


def planned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtune.plan(q, k, v)(q, k, v)


def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.ops.flashtune.attention(q, k, v, "none", None, "bhsd", "fastest")
    return out


def compiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = torch.compile(flashtune.attention, backend="aot_eager", fullgraph=True)(q, k, v, **options)
    return out


def drawn(*types: torch.dtype, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 20, 16).to(dtype).requires_grad_(requires_grad) for dtype in types]


MIXED = [
    (torch.float32, torch.float32, BF16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float16, BF16, torch.float32),
    (torch.float64, torch.float64, torch.float64),
]


@pytest.mark.parametrize("types", MIXED, ids=str)
def test_types_are_those_of_sdpa(types: tuple[torch.dtype, ...]) -> None:
    q, k, v = drawn(*types)
    with torch.autocast("cpu", BF16):
        out, expected = flashtune.attention(q, k, v), scaled_dot_product_attention(q, k, v)
        with torch.autocast("cpu", enabled=False):
            assert flashtune.attention(v, v, v).dtype is v.dtype
    assert out.dtype is expected.dtype
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


WAYS: dict[str, Call] = {
    "dense": flashtune.attention,
    "softcap": lambda q, k, v: flashtune.attention(q, k, v, softcap=5.0),
    "bias": lambda q, k, v: flashtune.attention(
        q, k, v, attn_bias=torch.linspace(0, 1, 20).view(1, 1, 1, 20)
    ),
    "packed": packed,
    "paged": paged,
    "flash_attn": flash,
    "plan": planned,
    "operator": operator,
    "compiled": compiled,
    "compiled softcap": lambda q, k, v: compiled(q, k, v, softcap=5.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_entry_points_cast(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, q, k, v = WAYS[way], *drawn(torch.float32, torch.float32, BF16)
    with torch.autocast("cpu", BF16):
        out = call(q, k, v)
        again = call(q.bfloat16(), k.bfloat16(), v)
    assert out.dtype is BF16
    assert torch.equal(out, again)
    if way != "bias":
        assert torch.equal(out, call(q.bfloat16(), k.bfloat16(), v))


@pytest.mark.parametrize("way", ["dense", "packed", "flash_attn", "compiled"])
def test_gradients_have_the_types_of_the_inputs(way: str) -> None:
    inputs = drawn(torch.float32, torch.float32, BF16, requires_grad=True)
    with torch.autocast("cpu", BF16):
        out = WAYS[way](*inputs)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    cast = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    wanted = torch.autograd.grad(WAYS[way](*cast).float().square().sum(), cast)
    for gradient, expected, source in zip(gradients, wanted, inputs, strict=True):
        assert gradient.dtype is source.dtype
        assert torch.equal(gradient, expected.to(gradient.dtype))


def test_rows_are_cast_to_the_type_of_a_cache() -> None:
    cache = flashtune.PagedKVCache(1, 16, 2, 16, device="cpu")
    rows = torch.randn(3, 2, 16)
    slots = cache.extend([cache.add()], [3])
    with torch.autocast("cpu", BF16):
        cache.append(rows, rows.bfloat16(), slots)
    assert torch.equal(cache.keys[0, 0, :3], rows.bfloat16())
