"""Tests of transformers' models served by flashtune in the interpreter, on the CPU, against float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashtune.integrations import transformers as integration
from flashtune.integrations import transformers_masks
from flashtune.integrations.transformers_jobs import Job, job_of, layer_of, refused_jobs
from flashtune.request.dropout import draw_seed, kept_weights
from flashtune.runtime.session import SESSION
from tests.support.models.served import note_served, serve_on_cpu
from tests.support.models.transformers_models import (
    ARCHITECTURES,
    error,
    inputs_of,
    model_of,
    passes_of,
    reference,
)
from tests.support.values import present

transformers = pytest.importorskip("transformers", minversion="5.17")
pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
DOUBLE = torch.float64


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Flashtune serves on the CPU. Whether it served each call."""
    SESSION.forget()
    serve_on_cpu(monkeypatch, torch.float32)
    is_served = note_served(monkeypatch)
    integration.register()
    yield is_served
    SESSION.wait()
    SESSION.forget()


# Windows and sinks, soft caps, a bias, and no causal mask. Float64 tests have all models.
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "t5", "bert"])
def test_logits_and_gradients(served: list[bool], name: str) -> None:
    side = {"images": "none", "audio to text": "right"}.get(ARCHITECTURES[name].kind, "left")
    inputs = inputs_of(name, side)
    want = reference(model_of(transformers, name, "eager", dtype=DOUBLE), inputs_of(name, side, dtype=DOUBLE))
    baseline = error(passes_of(model_of(transformers, name, ARCHITECTURES[name].usual), inputs), want)
    model = model_of(transformers, name, "tuned_attention")
    before = error(passes_of(model, inputs), want)
    SESSION.wait()
    served.clear()
    after = error(passes_of(model, inputs), want)
    assert served
    assert all(served)
    for errors in (before, after):
        assert errors[0] <= 2 * baseline[0] + 1e-5
        assert errors[1] <= 2 * baseline[1] + 1e-5


def test_bias_is_not_merged_with_a_causal_mask(served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("t5", "none")
    del inputs["attention_mask"]
    want = reference(model_of(transformers, "t5", "eager", dtype=DOUBLE), inputs)
    model = model_of(transformers, "t5", "tuned_attention")
    passes_of(model, inputs)
    SESSION.wait()
    served.clear()
    monkeypatch.setattr(transformers_masks, "bias_mask", None)
    errors = error(passes_of(model, inputs), want)
    assert served
    assert all(served)
    assert max(errors) <= 1e-4


@pytest.mark.usefixtures("served")
def test_refused_causal_mask_is_merged_with_the_bias() -> None:
    q = k = v = torch.randn(1, 2, 12, 16)
    bias = torch.randn(1, 2, 12, 12)

    def made() -> Job | None:
        return job_of(layer_of((q, k, v), None, bias, True, 1.0, {}))

    apart = present(made())
    assert apart.call.options.causal == "bottom_right"
    assert apart.call.side.bias is bias
    refused_jobs[present(apart.short)] = True
    merged = present(made())
    assert merged.call.options.causal == "none"
    assert merged.call.side.bias is not None
    assert (merged.call.side.bias[0, 0].tril() == bias[0, 0].tril()).all()
    assert (merged.call.side.bias[0, 0, 0, 1:] == torch.finfo(q.dtype).min).all()
    refused_jobs[present(merged.short)] = True
    assert made() is None
    refused_jobs.clear()


def layer(seed: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns the attention of a causal layer with dropout, by flashtune."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"dropout": 0.4, "scaling": 0.3, "computes_dropout": True}
    return integration.attention(torch.nn.Module(), q, k, v, None, **options)[0]


def dropped(seed: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns the same by definition."""
    torch.manual_seed(seed)
    heads, length = q.shape[0] * q.shape[1], q.shape[2]
    kept = kept_weights(draw_seed(q.device), torch.arange(heads), torch.arange(length), length, 0.4)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = 0.3 * q @ k.mT + torch.full((length, length), -torch.inf).triu(1)
    weights = scores.softmax(-1) * kept.view(scores.shape) / 0.6
    out: torch.Tensor = weights @ v
    return out.transpose(1, 2)


@pytest.mark.parametrize("how", ["alone", "checkpoint", "reentrant checkpoint"])
def test_dropout_on_request(served: list[bool], how: str) -> None:
    inputs = [torch.randn(2, heads, 20, 16) for heads in (4, 2, 2)]
    weight = torch.randn(2, 20, 4, 16)

    def passes(function: Callable[..., torch.Tensor], seed: int) -> list[torch.Tensor]:
        own_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        if how == "alone" or function is dropped:
            out = function(seed, *own_inputs)
        else:
            out = checkpoint(function, seed, *own_inputs, use_reentrant=how.startswith("reentrant"))
        out.backward(weight)
        return [out.detach(), *(tensor.grad for tensor in own_inputs if tensor.grad is not None)]

    for seed in (1, 2):
        torch.testing.assert_close(passes(layer, seed), passes(dropped, seed), atol=1e-4, rtol=1e-4)
    assert served
    assert all(served), "also the first call"


def test_models_drop_weights_on_request(served: list[bool]) -> None:
    name = integration.register("tuned_dropout", dropout=True)
    inputs = inputs_of("llama", "none")
    model = model_of(transformers, "llama", name, attention_dropout=0.5).train()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(inputs["input_ids"]).logits)
    assert served
    assert all(served)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
