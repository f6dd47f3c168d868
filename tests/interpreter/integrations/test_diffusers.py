"""Tests of diffusers' models on the CPU, through torch's operators and through flash_attn."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.integrations import torch as integration
from flashtune.runtime.session import SESSION
from tests.support.attention_operators import CUDNN, Originals, registered
from tests.support.models import diffusers_models
from tests.support.runtime import forget_all

diffusers = pytest.importorskip("diffusers", minversion="0.42")
pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
functional = torch.nn.functional


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Originals]:
    """Torch's operators on the CPU, which SDPA calls as on a GPU, with flashtune active over them."""
    forget_all()
    monkeypatch.setattr(integration, "KEY", "CPU")

    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        bias = attn_mask
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])
        operator: Any = getattr(torch.ops.aten, CUDNN)
        out: Tensor = operator(query, key, value, bias, False, dropout_p, is_causal, scale=scale)[0]
        return out

    with registered() as operators, integration.activate():
        monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
        yield operators
    SESSION.wait()
    SESSION.forget()


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_attention_of_models_is_served(name: str, originals: Originals) -> None:
    model = getattr(diffusers_models, name)(diffusers)
    want = diffusers_models.output(model)
    calls = originals.calls[CUDNN]
    assert calls, "torch serves until kernels are prepared"
    SESSION.wait()
    for _ in range(2):
        out = diffusers_models.output(model)
        SESSION.wait()
    assert originals.calls[CUDNN] == calls
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_pipelines_are_served(originals: Originals) -> None:
    pipeline = diffusers_models.pipeline(diffusers)
    with integration.disabled():
        want = diffusers_models.output(pipeline)
    diffusers_models.output(pipeline)
    SESSION.wait()
    calls = originals.calls[CUDNN]
    out = diffusers_models.output(pipeline)
    assert originals.calls[CUDNN] == calls
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


def test_its_flash_attn_backends_call_flashtune() -> None:
    diffusers_models.run_program("cpu")
