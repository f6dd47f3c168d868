"""Tests of transformers' models served by flashtune on a GPU, against float64 and transformers' attention."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune.integrations
from flashtune.integrations import transformers as integration
from flashtune.integrations import transformers_jobs
from flashtune.runtime.session import SESSION
from tests.gpu.calls import forget
from tests.support.models.served import move_padding, note_served
from tests.support.models.transformers_models import (
    ARCHITECTURES,
    error,
    generated,
    inputs_of,
    model_of,
    passes_of,
    reference,
)

transformers = pytest.importorskip("transformers", minversion="5.17")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")]
DOUBLE = torch.float64
NEW_TOKENS = 32
SIDES = {"images": ("none",), "audio to text": ("right",)}
CASES = [
    (name, side, dtype)
    for dtype, all_sides in ((torch.float32, ("left", "right")), (torch.bfloat16, ("left",)))
    for name, architecture in ARCHITECTURES.items()
    for side in SIDES.get(architecture.kind, all_sides)
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, kernels_win: Callable[[bool], None]) -> Iterator[list[bool]]:
    """Whether flashtune served each call. No replaced operator counts as faster, and padding is moved."""
    forget()
    SESSION.forget()
    kernels_win(True)
    move_padding(monkeypatch)
    is_served = note_served(monkeypatch)
    monkeypatch.setattr(transformers_jobs, "_usual", lambda *_: None)
    integration.register()
    yield is_served
    SESSION.wait()
    SESSION.forget()


def prepare(run: Any) -> None:
    """Runs a function until its kernels are prepared."""
    for _ in range(2):
        run()
        assert flashtune.integrations.wait(300)


@pytest.mark.parametrize(
    ("name", "side", "dtype"),
    [*CASES, ("llama", "hole", torch.float32), ("llama", "hole", torch.bfloat16)],
)
def test_logits_and_gradients(served: list[bool], name: str, side: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(name, side, "cuda", dtype)
    want = reference(
        model_of(transformers, name, "eager", "cuda", DOUBLE), inputs_of(name, side, "cuda", DOUBLE)
    )
    baseline = error(
        passes_of(model_of(transformers, name, ARCHITECTURES[name].usual, "cuda", dtype), inputs), want
    )
    model = model_of(transformers, name, "tuned_attention", "cuda", dtype)
    before = error(passes_of(model, inputs), want)
    prepare(lambda: passes_of(model, inputs))
    served.clear()
    after = error(passes_of(model, inputs), want)
    assert served
    assert all(served)
    for errors in (before, after):
        for own, original in zip(errors, baseline, strict=True):
            assert own <= 2 * original + 1e-5


@pytest.mark.parametrize(
    "name", [name for name, architecture in ARCHITECTURES.items() if architecture.generates]
)
def test_generated_tokens(served: list[bool], name: str) -> None:
    inputs = inputs_of(name, "right" if ARCHITECTURES[name].kind == "audio to text" else "left", "cuda")
    want = generated(model_of(transformers, name, ARCHITECTURES[name].usual, "cuda"), inputs, NEW_TOKENS)
    model = model_of(transformers, name, "tuned_attention", "cuda")
    assert torch.equal(generated(model, inputs, NEW_TOKENS), want)
    prepare(lambda: generated(model, inputs, NEW_TOKENS))
    served.clear()
    assert torch.equal(generated(model, inputs, NEW_TOKENS), want)
    assert served
    assert all(served)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_generation(served: list[bool], name: str) -> None:
    inputs = inputs_of(name, "left", "cuda")
    want = generated(model_of(transformers, name, ARCHITECTURES[name].usual, "cuda"), inputs, NEW_TOKENS)
    model = model_of(transformers, name, "tuned_attention", "cuda")
    for _ in range(2):
        tokens = generated(model, inputs, NEW_TOKENS, cache_implementation="static")
        assert torch.equal(tokens, want)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "bert"])
def test_no_layer_waits_for_the_gpu(served: list[bool], name: str) -> None:
    inputs = inputs_of(name, "left", "cuda")
    model = model_of(transformers, name, "tuned_attention", "cuda", torch.bfloat16)
    options = {} if name == "bert" else {"use_cache": False}

    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**inputs, **options).logits
            return logits

    prepare(run)
    served.clear()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert served
    assert all(served)


def test_long_sequences_with_padding(served: list[bool]) -> None:
    """Hopper's kernels serve both passes of moved sequences, and the masked ones those with windows."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(2, 64, (2, 700), generator=generator, device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :133] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    for name in ("llama", "gemma3"):
        changes = {"max_position_embeddings": 1024, "head_dim": 64}
        want = reference(model_of(transformers, name, "eager", "cuda", DOUBLE, **changes), inputs)
        baseline = error(
            passes_of(model_of(transformers, name, "sdpa", "cuda", torch.bfloat16, **changes), inputs), want
        )
        model = model_of(transformers, name, "tuned_attention", "cuda", torch.bfloat16, **changes)
        prepare(lambda model=model: passes_of(model, inputs))
        served.clear()
        errors = error(passes_of(model, inputs), want)
        assert all(served)
        assert all(own <= 2 * original + 1e-5 for own, original in zip(errors, baseline, strict=True))
