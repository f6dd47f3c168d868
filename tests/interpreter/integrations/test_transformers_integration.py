"""Tests of transformers' models served by flashtune in the interpreter, on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashtune.integrations import transformers as integration
from flashtune.integrations.transformers import Job
from flashtune.runtime import deferred
from tests.support.transformers_models import (
    ARCHITECTURES,
    error,
    generated,
    inputs_of,
    model_of,
    passes_of,
    reference,
)

transformers = pytest.importorskip("transformers", minversion="5.17")
pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
DOUBLE = torch.float64


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Flashtune serves on the CPU. Whether it served each call."""
    found: list[bool] = []
    original = integration.prepared

    def prepared(job: Job) -> Any:
        executor = original(job)
        found.append(executor is not None)
        return executor

    deferred.forget()
    monkeypatch.setattr(integration, "DEVICES", {"cpu"})
    monkeypatch.setattr(integration, "HALF", (torch.float32,))
    monkeypatch.setattr(integration, "MIN_MOVED", 2)
    monkeypatch.setattr(integration, "prepared", prepared)
    integration.register()
    yield found
    deferred.wait()
    deferred.forget()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_gradients(served: list[bool], name: str) -> None:
    side = {"images": "none", "audio to text": "right"}.get(ARCHITECTURES[name].kind, "left")
    inputs = inputs_of(name, side)
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs_of(name, side, dtype=DOUBLE))
    usual = error(passes_of(model_of(transformers, name, ARCHITECTURES[name].usual), inputs), want)
    model = model_of(transformers, name, "tuned_attention")
    before = error(passes_of(model, inputs), want)
    deferred.wait()
    served.clear()
    found = error(passes_of(model, inputs), want)
    assert served
    assert all(served)
    for errors in (before, found):
        assert errors[0] <= 2 * usual[0] + 1e-5
        assert errors[1] <= 2 * usual[1] + 1e-5


def test_bias_is_not_merged_with_a_causal_mask(served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("t5", "none")
    del inputs["attention_mask"]
    want = reference(model_of(transformers, "t5", "eager", dtype=DOUBLE), inputs)
    model = model_of(transformers, "t5", "tuned_attention")
    passes_of(model, inputs)
    deferred.wait()
    served.clear()
    monkeypatch.setattr(integration, "_bias_mask", None)
    found = error(passes_of(model, inputs), want)
    assert served
    assert all(served)
    assert max(found) <= 1e-4


@pytest.mark.usefixtures("served")
def test_refused_causal_mask_is_merged_with_the_bias() -> None:
    q = k = v = torch.randn(1, 2, 12, 16)
    bias = torch.randn(1, 2, 12, 12)

    def made() -> Job | None:
        return integration._job(q, k, v, None, 1.0, None, True, None, bias, {})

    apart = made()
    assert apart is not None
    assert apart.short is not None
    assert apart.call.options.causal == "bottom_right"
    assert apart.call.side.bias is bias
    integration._refused.add(apart.short)
    merged = made()
    assert merged is not None
    assert merged.short is not None
    assert merged.call.options.causal == "none"
    assert merged.call.side.bias is not None
    assert (merged.call.side.bias[0, 0].tril() == bias[0, 0].tril()).all()
    assert (merged.call.side.bias[0, 0, 0, 1:] == torch.finfo(q.dtype).min).all()
    integration._refused.add(merged.short)
    assert made() is None
    integration._refused.clear()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generated_tokens(served: list[bool], name: str) -> None:
    inputs = inputs_of(name, "left")
    want = generated(model_of(transformers, name, ARCHITECTURES[name].usual), inputs, 4)
    model = model_of(transformers, name, "tuned_attention")
    assert torch.equal(generated(model, inputs, 4), want)
    deferred.wait()
    served.clear()
    assert torch.equal(generated(model, inputs, 4), want)
    assert all(served)


@pytest.mark.parametrize("side", ["none", "left"])
def test_layers_that_are_computed_again(served: list[bool], side: str) -> None:
    """A layer has the same attention both times, although its kernels are prepared between them."""
    inputs = inputs_of("llama", side)
    want = reference(model_of(transformers, "llama", "eager", dtype=DOUBLE), inputs)
    model = model_of(transformers, "llama", "tuned_attention").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = passes_of(model, inputs, use_cache=False)
    assert served == [True] * 4
    assert all(one < 1e-4 for one in error(found, want))
