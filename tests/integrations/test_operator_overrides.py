"""Tests of overrides with executors that only count: which calls they serve, and which they pass on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.notices import FlashtuneWarning
from flashtune.core.session import SESSION
from flashtune.integrations.flash_operators import FlashBackward, FlashForward
from flashtune.integrations.operator_overrides import Kernel, forward_override, random_states
from flashtune.integrations.sdpa_operators import CUDNN, EFFICIENT, DenseBackward, DenseForward
from flashtune.request.call import Call
from flashtune.runtime import deferred
from flashtune.runtime.deferred import Entry, Passes


@pytest.fixture(name="served")
def served_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The queries of all calls that are served."""
    served: list[Tensor] = []

    def forward(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        served.append(q)
        return torch.empty_like(q), torch.empty(q.shape[:3])

    kind = Entry(None, None)
    kind.passes, kind.is_refused = Passes(forward, None, forward), False

    def kind_of(call: Call, *_: object) -> Entry | None:
        tensors = call.q, call.k, call.v, *call.side.tensors
        return None if any(tensor.is_meta for tensor in tensors) else kind

    monkeypatch.setattr(deferred, "entry_of", kind_of)
    SESSION.forget()
    yield served
    SESSION.forget()


def override_of(name: str) -> Kernel:
    return forward_override(DenseForward(name), lambda *_, **__: "torch")


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_known_call_with_a_tensor_elsewhere_is_read_again(served: list[Tensor], place: int) -> None:
    override = override_of(CUDNN)
    arguments: list[Any] = [torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16) for _ in range(4)]
    for _ in range(2):
        override(None, *arguments, False, 0.0, False, False)
    assert len(served) == 2
    arguments[place] = arguments[place].to("meta")
    assert override(None, *arguments, False, 0.0, False, False) == "torch"
    assert len(served) == 2


def test_calls_with_unknown_arguments_are_passed_on() -> None:
    q = torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16)
    SESSION.reset()
    override = forward_override(FlashForward(), lambda *_, **__: "torch")
    with pytest.warns(FlashtuneWarning, match="its override failed"):
        assert override(None, q, q, q, None, None, 16, 16, 0.0, False, False, "new") == "torch"


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_results_of_flash_have_the_order_of_the_inputs(served: list[Tensor], order: str) -> None:
    def tensor(length: int, heads: int) -> Tensor:
        if order == "bshd":
            return torch.zeros(1, length, heads, 32, dtype=torch.bfloat16)
        return torch.zeros(1, heads, length, 32, dtype=torch.bfloat16).transpose(1, 2)

    q, k = tensor(16, 4), tensor(24, 2)
    numbers = 16, 24, 0.0, False
    override = forward_override(FlashForward(), lambda *_, **__: "torch")
    out, _, state, unused, _ = override(None, q, k, k, None, None, *numbers, False)
    assert len(served) == 1
    assert served[0].is_contiguous()
    assert (out.shape, out.stride()) == (q.shape, q.stride())
    backward = FlashBackward()
    arguments = q, q, k, k, out, torch.zeros(1, 4, 16), None, None, *numbers, state, unused
    reading = backward.read(arguments, {})
    assert reading is not None
    call = reading.call
    assert call.options.layout == order
    assert all(operand.is_contiguous() for operand in (call.q, *backward.saved(arguments, reading)))
    gradients = SimpleNamespace(dq=call.q, dk=call.k, dv=call.v)
    results = backward.results(gradients, reading)  # type: ignore[arg-type]
    for result, other in zip(results, (q, k, k), strict=True):
        assert (result.shape, result.stride()) == (other.shape, other.stride())


def test_a_refused_call_of_flash_refuses_no_other_kind(
    served: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.zeros(1, 16, 4, 32, dtype=torch.bfloat16)
    arguments = q, q, q, None, None, 16, 16, 0.0, True, False
    override = forward_override(FlashForward(), lambda *_, **__: "torch")
    entry_of = deferred.entry_of

    def kind_of(call: Call, *others: Any) -> Entry | None:
        refused = Entry(None, None)
        refused.is_refused, refused.count, refused.properties = True, None, ()
        is_refused = call.options.window_left is not None or torch.is_grad_enabled()
        return refused if is_refused else entry_of(call, *others)

    monkeypatch.setattr(deferred, "entry_of", kind_of)
    for _ in range(2):
        with torch.enable_grad():
            assert override(None, *arguments) == "torch"
        with torch.no_grad():
            assert override(None, *arguments, window_size_left=5) == "torch"
    assert served == []
    with torch.no_grad():
        override(None, *arguments)
    assert len(served) == 1


def test_calls_of_flash_are_passed_on_if_the_output_would_have_other_strides() -> None:
    q = torch.zeros(1, 16, 4, 32, dtype=torch.bfloat16)
    mixed = torch.zeros(16, 4, 1, 32, dtype=torch.bfloat16).permute(2, 0, 1, 3)[:, :, :1].expand(1, 16, 4, 32)
    numbers = None, None, 16, 16, 0.0, False, False
    with torch.enable_grad():
        assert FlashForward().read((q, q, q, *numbers), {}) is not None
        assert FlashForward().read((mixed, q, q, *numbers), {}) is None
        # Gradients have the strides of each input.
        assert FlashForward().read((q, mixed, mixed, *numbers), {}) is not None


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
def test_the_backward_pass_of_a_call_with_dropout_is_passed_on(name: str) -> None:
    q = torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    states = random_states(q, torch.int64)
    lse = torch.zeros(1, 2, 32)

    def arguments(dropout: float) -> tuple[Any, ...]:
        if name == CUDNN:
            return q, q, q, q, q, lse, *states, None, None, None, 16, 16, dropout, False
        return q, q, q, q, None, q, lse, *states, dropout, (True, True, True, False), False

    backward = DenseBackward(name)
    assert backward.read(arguments(0.0), {}) is not None
    assert backward.read(arguments(0.5), {}) is None
