"""Torch's `flex_attention` served by flashtune in the interpreter, on the CPU, against float64."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from flashtune.integrations import flex_attention as integration
from flashtune.runtime.session import SESSION
from tests.support.models.transformers_models import inputs_of, model_of

TORCHS: Any = flex.flex_attention


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[integration.Activation]:
    """Flashtune serves on the CPU."""
    monkeypatch.setattr(integration, "DEVICES", {"cpu"})
    monkeypatch.setattr("flashtune.core.notices._seen_messages", {"flex_attention": None})
    with integration.activate() as activation:
        yield activation
    SESSION.forget()


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 150, 16, dtype=dtype) for heads in (4, 2, 2)]


def attend(*arguments: Any, **options: Any) -> Any:
    """Returns the result of torch's function, which may be replaced."""
    return flex.flex_attention(*arguments, **options)


def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + (k - q) / (h + 2.0)


def refused(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.lgamma(s.abs() + 1)


def exact(score_mod: Any, mask: Any = None) -> tuple[Tensor, Tensor]:
    wide = (tensor.double() for tensor in inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = TORCHS(*wide, score_mod, mask, enable_gqa=True, return_lse=True)
    return out.float(), lse.float()


@pytest.mark.filterwarnings("ignore")
def test_torchs_function_is_served_with_all_forms_of_results(active: integration.Activation) -> None:
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 150, 150, device="cpu")
    want = exact(score, mask)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": True, "kernel_options": {"BLOCK_M": 64}}
    out = attend(*inputs(), score, **options)
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-4)
    _, lse = attend(*inputs(), score, return_lse=True, **options)
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-4)
    _, aux = attend(*inputs(), score, return_aux=flex.AuxRequest(lse=True), **options)
    assert aux.max_scores is None
    torch.testing.assert_close(aux.lse, want[1], atol=1e-5, rtol=1e-4)
    assert (active.served, active.refused) == (3, {})


@pytest.mark.filterwarnings("ignore")
def test_refused_calls_go_to_torch_and_are_counted(active: integration.Activation) -> None:
    want = exact(refused)
    for _ in range(2):
        out = attend(*inputs(), refused, enable_gqa=True)
        torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-4)
    request = flex.AuxRequest(max_scores=True)
    with pytest.raises(NotImplementedError, match="max scores"):
        attend(*inputs(), score, enable_gqa=True, return_aux=request)
    assert active.served == 0
    assert sorted(active.refused.values()) == [1, 2]
    assert any("lgamma" in sentence for sentence in active.refused)


@pytest.mark.filterwarnings("ignore")
def test_compiled_programs_are_served(active: integration.Activation) -> None:
    @torch.compile(backend="eager")
    def program(q: Tensor, k: Tensor, v: Tensor, score_mod: Any) -> Any:
        return flex.flex_attention(2 * q, k, v, score_mod, enable_gqa=True) + 1

    q, k, v = inputs()
    want = TORCHS(2 * q, k, v, score, enable_gqa=True) + 1
    torch.testing.assert_close(program(q, k, v, score), want, atol=1e-5, rtol=1e-4)
    assert active.served == 1
    compiled = []

    def replacement(*arguments: Any, **options: Any) -> Any:
        compiled.append(options)
        return TORCHS(*arguments, **options)

    active._compiled = replacement
    want = TORCHS(2 * q, k, v, refused, enable_gqa=True) + 1
    torch.testing.assert_close(program(q, k, v, refused), want, atol=1e-5, rtol=1e-4)
    assert len(compiled) == 1
    active._compiled = None
    out = program(q.double(), k.double(), v.double(), refused)
    torch.testing.assert_close(out.float(), want, atol=1e-5, rtol=1e-4)


def test_deactivation_restores_torchs_function() -> None:
    with integration.activate() as first:
        assert integration.activate() is first
        assert integration.is_active()
        assert flex.flex_attention is not TORCHS
    assert not integration.is_active()
    assert flex.flex_attention is TORCHS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma2", "llama"])
@pytest.mark.parametrize("is_imported_before", [True, False])
def test_models_of_transformers(name: str, is_imported_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from transformers.integrations import flex_attention as host

    monkeypatch.setattr(integration, "DEVICES", {"cpu"})
    given = inputs_of(name, "right")
    want = model_of(transformers, name, "eager", dtype=torch.float64)(**given).logits
    # The functions of the host's module are restored before the activation ends.
    with integration.activate() as active, monkeypatch.context() as patch, torch.no_grad():
        if not is_imported_before:
            # As a module that is imported now.
            patch.setattr(host, integration.COMPILED, active._original_compiled)
            patch.setattr(host, "flex_attention", flex.flex_attention)
            patch.setattr(host.WrappedFlexAttention, "_instance", None)
        logits = model_of(transformers, name, "flex_attention").eval()(**given).logits
    seen = given["attention_mask"].bool()
    torch.testing.assert_close(logits[seen], want[seen].float(), atol=1e-4, rtol=1e-4)
    assert active.served
    assert not active.refused
