"""Tests of diffusers' models on a GPU, through torch's operators and through flash_attn."""

from collections.abc import Callable
from typing import Any

import pytest

from flashtune.integrations import operator_overrides
from flashtune.integrations import torch as integration
from flashtune.runtime.session import SESSION
from tests.gpu.calls import forget
from tests.support.models import diffusers_models
from tests.support.models.diffusers_models import largest, output

diffusers = pytest.importorskip("diffusers", minversion="0.42")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")]


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_attention_of_models_is_served(
    monkeypatch: pytest.MonkeyPatch, kernels_win: Callable[[bool], None], name: str
) -> None:
    forget()
    SESSION.forget()
    kernels_win(True)
    passed_on: list[str] = []
    override = operator_overrides.forward_override

    def counted(operator: Any, original: Any) -> Any:
        def passed(*args: Any, **options: Any) -> Any:
            passed_on.append(operator.name)
            return original(*args, **options)

        return override(operator, passed)

    monkeypatch.setattr(integration, "forward_override", counted)
    model = getattr(diffusers_models, name)(diffusers).cuda()
    want = output(model, masked=False)
    model = model.bfloat16()
    by_torch = output(model, masked=False)
    with integration.activate():
        for _ in range(2):
            output(model, masked=False)
            assert SESSION.wait(300)
        assert passed_on, "torch serves until kernels are prepared"
        passed_on.clear()
        out = output(model, masked=False)
    assert not passed_on
    assert largest(out - want) <= 2 * largest(by_torch - want) + 1e-2


def test_its_flash_attn_backends_call_flashtune() -> None:
    diffusers_models.run_program("cuda")
