"""Tests of which operators torch's functions call on a Hopper GPU: flashtune overrides them."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, varlen

from flashtune.integrations import torch as integration
from scripts.host_contracts import OPERATORS
from tests.support import host_stubs

OVERRIDDEN = {
    override.name
    for group in (
        integration.FORWARD,
        integration.FLASH_FORWARD,
        integration.BACKWARD,
        integration.FLASH_BACKWARD,
    )
    for override in group
}
# SDPA's flash backend calls the second operator.
BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.FLASH_ATTENTION: "_flash_attention_forward",
}


class Operators:
    """The namespace `torch.ops.aten`, whose operators are counted and compute nothing."""

    def __init__(self, called: list[str]) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **options: object) -> tuple[None, ...]:
            self._called.append(name)
            return (None,) * (5 if "flash" in name else 9)

        return call


class Hopper:
    """Torch as on a Hopper GPU with cuDNN."""

    def __init__(self, called: list[str]) -> None:
        self.ops = SimpleNamespace(aten=Operators(called), torch_attn=SimpleNamespace())
        for name in {"_varlen_attn", "_varlen_attn_out"} & {*vars(varlen)}:
            setattr(self.ops.torch_attn, name, getattr(varlen, name)._init_fn)
        cudnn = SimpleNamespace(version=lambda: 92600)
        self.backends = SimpleNamespace(cudnn=cudnn)
        self.version = SimpleNamespace(hip=None)
        capability, device = lambda index: (9, 0), lambda index: contextlib.nullcontext()
        self.cuda = SimpleNamespace(get_device_capability=capability, device=device)
        self._C = SimpleNamespace(
            _get_cudnn_sdp_enabled=lambda: True,
            _get_flash_sdp_enabled=lambda: True,
            _is_cudnn_attention_decode_disabled=lambda: False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that `varlen` calls."""
    names: list[str] = []
    cached = [value for value in vars(varlen).values() if hasattr(value, "cache_clear")]
    monkeypatch.setattr(varlen, "torch", Hopper(names))
    for function in cached:
        function.cache_clear()
    with FakeTensorMode():
        yield names
    for function in cached:
        function.cache_clear()


def packed(width: int = 128) -> tuple[Tensor, Tensor]:
    q = torch.empty(1000, 8, width, device="cuda:0", dtype=torch.bfloat16)
    return q, torch.empty(5, device="cuda:0", dtype=torch.int32)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("longest", [1, 512])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (255, 0)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_operators_of_packed_calls_are_overridden(
    called: list[str], width: int, longest: int, window: tuple[int, int], is_shared: bool
) -> None:
    q, starts = packed(width)
    starts_k = starts if is_shared else starts.clone()
    varlen.varlen_attn(q, q, q, starts, starts_k, longest, longest, window_size=window)
    if hasattr(varlen, "varlen_attn_out"):
        varlen.varlen_attn_out(q, q, q, q, starts, starts_k, longest, longest, window_size=window)
    assert called
    assert {*called} <= OVERRIDDEN


def test_operators_of_paged_calls_are_overridden(called: list[str]) -> None:
    q, starts = packed()
    cache = torch.empty(9, 64, 8, 128, device="cuda:0", dtype=torch.bfloat16)
    table, lengths = starts.new_empty(4, 2), starts.new_empty(4)
    options = {"seqused_k": lengths, "block_table": table, "window_size": (-1, 0)}
    varlen.varlen_attn(q, cache, cache, starts, None, 1, 128, **options)  # type: ignore[arg-type]
    assert called
    assert {*called} <= OVERRIDDEN


def test_operators_of_all_backends_of_sdpa_are_overridden() -> None:
    others = {SDPBackend.ERROR, SDPBackend.MATH, SDPBackend.OVERRIDEABLE}
    assert set(SDPBackend.__members__.values()) == {*BACKENDS, *others}
    assert {*BACKENDS.values()} <= OVERRIDDEN


def test_operators_of_the_newest_torch_are_overridden() -> None:
    modules = host_stubs.contract("torch")["modules"]
    called = {
        name for function in modules["torch.nn.attention.varlen"].values() for name in function[OPERATORS]
    }
    assert called <= OVERRIDDEN
