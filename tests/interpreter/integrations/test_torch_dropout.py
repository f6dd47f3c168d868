"""Tests of SDPA's operators with flashtune's dropout in the interpreter, on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtune.integrations import operator_overrides
from flashtune.integrations import torch as integration
from flashtune.request.dropout import draw_seed
from flashtune.runtime import deferred
from tests.support.attention_operators import (
    CUDNN,
    EFFICIENT,
    Originals,
    by_definition,
    dropout_factors,
    registered,
)
from tests.support.process_state import forget_warnings

pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
aten = torch.ops.aten
DROPOUT = 0.3
# Places of the seed in the results of the operators.
SEEDS = {CUDNN: 6, EFFICIENT: 2}
both_backends = pytest.mark.parametrize("name", [CUDNN, EFFICIENT])


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Originals]:
    """Torch's operators on the CPU, with flashtune active over them, dropout included."""
    forget_warnings()
    deferred.forget()
    operator_overrides.forget()
    monkeypatch.setattr(integration, "KEY", "CPU")
    lasting: list[integration.Overrides] = []
    monkeypatch.setattr(integration, "_dropout", lasting)
    with registered() as found:
        with integration.activate(dropout=True):
            yield found
        for one in lasting:
            one.remove()
    deferred.wait()
    deferred.forget()


class Case:
    """Calls of one operator, and their results by definition."""

    def __init__(self, name: str, *, causal: bool = True, bias: Tensor | None = None) -> None:
        torch.manual_seed(1)
        self.name, self.causal, self.bias = name, causal, bias
        lengths = (4, 20, 32), (2, 28, 32), (2, 28, 16)
        self.given: tuple[Tensor, ...] = tuple(
            torch.randn(2, length, heads, width).transpose(1, 2).requires_grad_()
            for heads, length, width in lengths
        )
        self.dout = torch.randn(2, 4, 20, 16)

    def results(self, dropout: float = DROPOUT) -> tuple[Any, ...]:
        found: tuple[Any, ...] = getattr(aten, self.name)(*self.given, self.bias, True, dropout, self.causal)
        return found

    def out(self) -> Tensor:
        out: Tensor = self.results()[0]
        return out

    def prepare(self) -> None:
        self.out()
        deferred.wait()
        self.out()

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.given, self.dout.to(out.dtype))

    def expected(self, seed: Tensor | None) -> tuple[Tensor, ...]:
        """The output and the gradients, without dropout if there is no seed."""
        q, k, v = (one.double() for one in self.given)
        factors = None if seed is None else dropout_factors(seed, q, k, DROPOUT)
        bias = None if self.bias is None else self.bias.double()
        out, _ = by_definition(q, k, v, bias, causal=self.causal, factors=factors)
        return (out, *self.gradients(out))


def all_close(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=3e-5, rtol=3e-5)


def seeds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The seeds of the calls from now on."""
    found: list[Tensor] = []
    draw = operator_overrides.draw

    def noted(states: operator_overrides.States) -> None:
        draw(states)
        found.append(states[0].clone())

    monkeypatch.setattr(operator_overrides, "draw", noted)
    return found


@both_backends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_both_passes_drop_the_weights_of_the_seed(
    originals: Originals, name: str, causal: bool, with_bias: bool
) -> None:
    case = Case(name, causal=causal, bias=torch.randn(2, 4, 20, 28) if with_bias else None)
    case.prepare()
    assert originals.calls[name] == 1, "the second call is served"
    results = case.results()
    found = results[0], *case.gradients(results[0])
    assert originals.calls == {name: 1}
    all_close(found, case.expected(results[SEEDS[name]]))
    for one, like in zip(found[1:], case.given, strict=True):
        assert one.stride() == torch.empty_like(like).stride()
    with integration.disabled():
        for one, other in zip(results, case.results(), strict=True):
            assert type(one) is type(other)
            if isinstance(one, Tensor):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@both_backends
def test_seeds_are_those_of_the_generator(originals: Originals, name: str) -> None:
    case = Case(name)
    case.prepare()
    torch.manual_seed(5)
    want = [int(draw_seed(torch.device("cpu"))) for _ in range(2)]
    torch.manual_seed(5)
    found = [case.results() for _ in range(2)]
    assert [int(one[SEEDS[name]]) for one in found] == want
    assert not torch.equal(found[0][0], found[1][0])
    torch.manual_seed(5)
    assert torch.equal(case.out(), found[0][0])


@both_backends
@pytest.mark.parametrize("dropout", [1.0, 0.0])
def test_other_probabilities_draw_nothing(originals: Originals, name: str, dropout: float) -> None:
    case = Case(name)
    before = torch.get_rng_state()
    for _ in range(3):
        out = case.results(dropout)[0]
        deferred.wait()
    case.gradients(out)
    passed_on = {name: 3, f"{name}_backward": 1} if dropout else {name: 1}
    assert originals.calls == passed_on
    assert torch.equal(torch.get_rng_state(), before)


@both_backends
def test_calls_are_passed_on_without_the_option(originals: Originals, name: str) -> None:
    integration.deactivate()
    case = Case(name)
    with integration.activate():
        before = torch.get_rng_state()
        for number in range(1, 4):
            found = case.out()
            deferred.wait()
            assert originals.calls[name] == number
        gradients = case.gradients(found)
    assert originals.calls[f"{name}_backward"] == 1
    all_close((found, *gradients), case.expected(None))
    assert torch.equal(torch.get_rng_state(), before)


@both_backends
def test_a_checkpoint_drops_the_same_weights_again(
    originals: Originals, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = Case(name)
    case.prepare()
    drawn = seeds(monkeypatch)
    out = checkpoint(lambda *_: case.out(), *case.given, use_reentrant=False)
    assert isinstance(out, Tensor)
    torch.rand(3)
    found = out, *case.gradients(out)
    first, second = drawn
    assert torch.equal(first, second)
    all_close(found, case.expected(first))


def deactivated() -> None:
    integration.deactivate()


def reactivated() -> None:
    integration.deactivate()
    integration.activate()


def forgotten() -> None:
    """No kernels are known, as after the start of a recording."""
    deferred.forget()
    operator_overrides.forget()


@both_backends
@pytest.mark.parametrize("change", [deactivated, reactivated, forgotten])
def test_later_backward_passes_are_served(
    originals: Originals, name: str, change: Callable[[], None]
) -> None:
    case = Case(name)
    case.prepare()
    results = case.results()
    change()
    all_close((results[0], *case.gradients(results[0])), case.expected(results[SEEDS[name]]))
    assert not originals.calls[f"{name}_backward"]


@both_backends
def test_after_deactivation_new_calls_are_those_of_torch(originals: Originals, name: str) -> None:
    case = Case(name)
    case.prepare()
    integration.deactivate()
    out = case.out()
    assert originals.calls[name] == 2
    all_close((out, *case.gradients(out)), case.expected(None))


@both_backends
@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize("in_capture", [True, False])
def test_saved_tensors_may_be_copied(
    originals: Originals, monkeypatch: pytest.MonkeyPatch, name: str, in_capture: bool, is_served: bool
) -> None:
    """Hooks that move saved tensors to the CPU may return contiguous copies."""
    monkeypatch.setattr("flashtune.integrations.sdpa_dropout.is_capturing", lambda _: in_capture)
    case = Case(name)
    case.prepare()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.clone(memory_format=torch.contiguous_format), lambda copied: copied
    ):
        if is_served:
            results = case.results()
        else:
            with integration.disabled():
                results = case.results()
    seed = results[SEEDS[name]] if is_served else None
    all_close((results[0], *case.gradients(results[0])), case.expected(seed))
    assert originals.calls[f"{name}_backward"] == (in_capture or not is_served)


def test_the_gradient_of_a_bias_has_the_strides_of_torch(originals: Originals) -> None:
    """Compiled programs and distributed tensors do not show whether a bias requires grad."""
    case = Case(EFFICIENT, bias=torch.randn(2, 4, 20, 28))
    case.prepare()
    with torch.no_grad():
        out, lse, *states = case.results()
        args = *case.given, case.bias, out, lse, *states, DROPOUT, (True,) * 4, True
        found = aten._scaled_dot_product_efficient_attention_backward(case.dout, *args)
    assert not originals.calls[f"{EFFICIENT}_backward"]
    q, k, v = (one.double() for one in case.given)
    assert case.bias is not None
    bias = case.bias.double().requires_grad_()
    want, _ = by_definition(q, k, v, bias, causal=True, factors=dropout_factors(states[0], q, k, DROPOUT))
    all_close(found, torch.autograd.grad(want, (*case.given, bias), case.dout.double()))
    assert found[3].stride() == (4 * 20 * 32, 20 * 32, 32, 1)


@both_backends
def test_results_are_those_of_the_meta_kernel(originals: Originals, name: str) -> None:
    case = Case(name)
    case.prepare()
    args = (*case.given, None, True, DROPOUT, True)
    torch.library.opcheck(getattr(aten, name).default, args, test_utils="test_faketensor")
    assert originals.calls[name] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls(originals: Originals, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    case = Case(CUDNN)
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, DROPOUT, True)[0]
        return out + 1

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for _ in range(2):
        case.gradients(compiled(*case.given))
        deferred.wait()
    drawn = seeds(monkeypatch)
    originals.calls.clear()
    out = compiled(*case.given)
    found = out - 1, *case.gradients(out)
    assert not originals.calls
    all_close(found, case.expected(drawn[0]))
