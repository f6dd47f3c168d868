"""Tests of an attention processor as diffusers has it, which reaches flashtune through torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flashtune.integrations import operator_overrides
from flashtune.integrations import torch as integration
from flashtune.runtime import deferred
from tests.gpu.calls import forget

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")]
HEADS, WIDTH = 8, 64


class Processor(nn.Module):
    """Self-attention of latents, or cross-attention to a text."""

    def __init__(self, text_width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.to_k = nn.Linear(text_width, HEADS * WIDTH)
        self.to_v = nn.Linear(text_width, HEADS * WIDTH)
        self.to_out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, latents: Tensor, text: Tensor | None = None) -> Tensor:
        text = latents if text is None else text
        q, k, v = (
            one.view(len(latents), -1, HEADS, WIDTH).transpose(1, 2)
            for one in (self.to_q(latents), self.to_k(text), self.to_v(text))
        )
        out = scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False)
        found: Tensor = self.to_out(out.transpose(1, 2).reshape(len(latents), -1, HEADS * WIDTH))
        return found


@pytest.mark.parametrize("text_length", [None, 77])
def test_a_processor_is_served(monkeypatch: pytest.MonkeyPatch, text_length: int | None) -> None:
    forget()
    deferred.forget()
    operator_overrides.forget()
    monkeypatch.setattr(deferred, "beats", lambda *_: True)
    passed_on: list[str] = []
    override = operator_overrides.forward_override

    def counted(operator: Any, original: Any) -> Any:
        def passed(*args: Any, **options: Any) -> Any:
            passed_on.append(operator.name)
            return original(*args, **options)

        return override(operator, passed)

    monkeypatch.setattr(integration, "forward_override", counted)
    torch.manual_seed(0)
    text_width = HEADS * WIDTH if text_length is None else 96
    processor = Processor(text_width).cuda()
    latents = torch.randn(2, 1024, HEADS * WIDTH, device="cuda")
    text = None if text_length is None else torch.randn(2, text_length, text_width, device="cuda")
    want = processor(latents, text)
    processor = processor.bfloat16()
    given = latents.bfloat16(), None if text is None else text.bfloat16()
    with torch.no_grad(), integration.activate():
        for _ in range(2):
            processor(*given)
            assert deferred.wait(300)
        assert passed_on, "torch serves until kernels are prepared"
        passed_on.clear()
        found = processor(*given)
    assert not passed_on
    torch.testing.assert_close(found.float(), want, atol=3e-2, rtol=3e-2)
