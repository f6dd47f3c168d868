"""Tests of diffusers' models on the CPU, through torch's operators and through flash_attn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.integrations import torch as integration
from flashtune.runtime.session import SESSION
from tests.support.attention_operators import CUDNN, Originals
from tests.support.models import diffusers_models

diffusers = pytest.importorskip("diffusers", minversion="0.42")
pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
functional = torch.nn.functional


@pytest.fixture(name="operators")
def operators_of_sdpa(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> Originals:
    """Torch's operators on the CPU, which SDPA calls as on a GPU."""

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

    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    return originals


@pytest.mark.parametrize("name", ["unet", "transformer", "pipeline"])
def test_attention_of_models_is_served(name: str, operators: Originals) -> None:
    model = getattr(diffusers_models, name)(diffusers)
    with integration.disabled():
        want = diffusers_models.output(model)
    calls = operators.calls[CUDNN]
    assert calls
    # Torch may serve until kernels are prepared.
    diffusers_models.output(model)
    SESSION.wait()
    calls = operators.calls[CUDNN]
    out = diffusers_models.output(model)
    assert operators.calls[CUDNN] == calls
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


def test_its_flash_attn_backends_call_flashtune() -> None:
    diffusers_models.run_program("cpu")
