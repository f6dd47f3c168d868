"""Tests of overrides of operators: which ones torch calls, and which calls are served or passed on."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, varlen

from flashtune.core.notices import FlashtuneWarning
from flashtune.integrations import torch as integration
from flashtune.integrations.flash_operators import FlashBackward, FlashForward
from flashtune.integrations.operator_overrides import ForwardOperator, Kernel, forward_override, random_states
from flashtune.integrations.sdpa_operators import CUDNN, EFFICIENT, DenseBackward, DenseForward
from flashtune.request.call import Call
from flashtune.runtime.buckets import Entry, Passes
from flashtune.runtime.session import Session
from scripts.host_contracts import OPERATORS
from tests.support import host_stubs
from tests.support.runtime import forget_all


class Serving(Session):
    """A session that serves calls of tensors with memory and notes their queries.

    Attributes:
        served: The queries of all calls that are served.
        refuses: Whether a call is refused.
    """

    def __init__(self, refuses: Callable[[Call], bool] = lambda _: False) -> None:
        super().__init__()
        self.served: list[Tensor] = []
        self.refuses = refuses

    def entry(self, call: Call, *_: object) -> Entry | None:
        tensors = call.q, call.k, call.v, *call.side.tensors
        if any(tensor.is_meta for tensor in tensors):
            return None
        entry = Entry(None, None)
        entry.is_refused = self.refuses(call)
        if not entry.is_refused:
            entry.passes = Passes(self.forward, None, self.forward)
        return entry

    def forward(self, q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.served.append(q)
        return torch.empty_like(q), torch.empty(q.shape[:3])


def override_of(operator: ForwardOperator, session: Session) -> Kernel:
    return forward_override(operator, lambda *_, **__: "torch", session)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_known_call_with_a_tensor_elsewhere_is_read_again(index: int) -> None:
    session = Serving()
    override = override_of(DenseForward(CUDNN), session)
    arguments: list[Any] = [torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16) for _ in range(4)]
    for _ in range(2):
        override(None, *arguments, False, 0.0, False, False)
    assert len(session.served) == 2
    arguments[index] = arguments[index].to("meta")
    assert override(None, *arguments, False, 0.0, False, False) == "torch"
    assert len(session.served) == 2


def test_calls_of_operators_are_forgotten_alone_and_with_all_others() -> None:
    session = Serving()
    override = override_of(DenseForward(CUDNN), session)
    inputs = [torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16) for _ in range(4)]
    _, served = session.operators[CUDNN]
    for forget in (session.forget_operators, session.forget):
        session.executors["kind",] = session.forward
        override(None, *inputs, False, 0.0, False, False)
        assert len(served) == 1
        forget()
        assert len(served) == 0
        assert bool(session.executors) is (forget == session.forget_operators)


def test_calls_with_unknown_arguments_are_passed_on() -> None:
    q = torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16)
    forget_all()
    override = override_of(FlashForward(), Serving())
    with pytest.warns(FlashtuneWarning, match="its override failed"):
        assert override(None, q, q, q, None, None, 16, 16, 0.0, False, False, "new") == "torch"


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_results_of_flash_have_the_order_of_the_inputs(order: str) -> None:
    session = Serving()

    def tensor(length: int, heads: int) -> Tensor:
        if order == "bshd":
            return torch.zeros(1, length, heads, 32, dtype=torch.bfloat16)
        return torch.zeros(1, heads, length, 32, dtype=torch.bfloat16).transpose(1, 2)

    q, k = tensor(16, 4), tensor(24, 2)
    numbers = 16, 24, 0.0, False
    override = override_of(FlashForward(), session)
    out, _, state, unused, _ = override(None, q, k, k, None, None, *numbers, False)
    assert len(session.served) == 1
    assert session.served[0].is_contiguous()
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


def test_a_refused_call_of_flash_refuses_no_other_kind() -> None:
    q = torch.zeros(1, 16, 4, 32, dtype=torch.bfloat16)
    arguments = q, q, q, None, None, 16, 16, 0.0, True, False
    session = Serving(lambda call: call.options.window_left is not None or torch.is_grad_enabled())
    override = override_of(FlashForward(), session)
    for _ in range(2):
        with torch.enable_grad():
            assert override(None, *arguments) == "torch"
        with torch.no_grad():
            assert override(None, *arguments, window_size_left=5) == "torch"
    assert session.served == []
    with torch.no_grad():
        override(None, *arguments)
    assert len(session.served) == 1


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


OVERRIDDEN = {
    override.name
    for group in (
        integration.FORWARD,
        integration.FLASH_FORWARD,
        integration.BACKWARD,
        integration.FLASH_BACKWARD,
    )
    for override in group
}
# SDPA's flash backend calls the second operator.
BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.FLASH_ATTENTION: "_flash_attention_forward",
}


class Operators:
    """The namespace `torch.ops.aten`. Its operators are counted and compute nothing."""

    def __init__(self, called: list[str]) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **options: object) -> tuple[None, ...]:
            self._called.append(name)
            return (None,) * (5 if "flash" in name else 9)

        return call


class Hopper:
    """Torch as on a Hopper GPU with cuDNN."""

    def __init__(self, called: list[str]) -> None:
        self.ops = SimpleNamespace(aten=Operators(called), torch_attn=SimpleNamespace())
        for name in {"_varlen_attn", "_varlen_attn_out"} & {*vars(varlen)}:
            setattr(self.ops.torch_attn, name, getattr(varlen, name)._init_fn)
        cudnn = SimpleNamespace(version=lambda: 92600)
        self.backends = SimpleNamespace(cudnn=cudnn)
        self.version = SimpleNamespace(hip=None)
        capability, device = lambda index: (9, 0), lambda index: contextlib.nullcontext()
        self.cuda = SimpleNamespace(get_device_capability=capability, device=device)
        self._C = SimpleNamespace(
            _get_cudnn_sdp_enabled=lambda: True,
            _get_flash_sdp_enabled=lambda: True,
            _is_cudnn_attention_decode_disabled=lambda: False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators that `varlen` calls."""
    names: list[str] = []
    cached = [value for value in vars(varlen).values() if hasattr(value, "cache_clear")]
    monkeypatch.setattr(varlen, "torch", Hopper(names))
    for function in cached:
        function.cache_clear()
    with FakeTensorMode():
        yield names
    for function in cached:
        function.cache_clear()


def packed(width: int = 128) -> tuple[Tensor, Tensor]:
    q = torch.empty(1000, 8, width, device="cuda:0", dtype=torch.bfloat16)
    return q, torch.empty(5, device="cuda:0", dtype=torch.int32)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("longest", [1, 512])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (255, 0)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_operators_of_packed_calls_are_overridden(
    called: list[str], width: int, longest: int, window: tuple[int, int], is_shared: bool
) -> None:
    q, starts = packed(width)
    starts_k = starts if is_shared else starts.clone()
    varlen.varlen_attn(q, q, q, starts, starts_k, longest, longest, window_size=window)
    if hasattr(varlen, "varlen_attn_out"):
        varlen.varlen_attn_out(q, q, q, q, starts, starts_k, longest, longest, window_size=window)
    assert called
    assert {*called} <= OVERRIDDEN


def test_operators_of_paged_calls_are_overridden(called: list[str]) -> None:
    q, starts = packed()
    cache = torch.empty(9, 64, 8, 128, device="cuda:0", dtype=torch.bfloat16)
    table, lengths = starts.new_empty(4, 2), starts.new_empty(4)
    options = {"seqused_k": lengths, "block_table": table, "window_size": (-1, 0)}
    varlen.varlen_attn(q, cache, cache, starts, None, 1, 128, **options)  # type: ignore[arg-type]
    assert called
    assert {*called} <= OVERRIDDEN


def test_operators_of_all_backends_of_sdpa_are_overridden() -> None:
    others = {SDPBackend.ERROR, SDPBackend.MATH, SDPBackend.OVERRIDEABLE}
    assert set(SDPBackend.__members__.values()) == {*BACKENDS, *others}
    assert {*BACKENDS.values()} <= OVERRIDDEN


def test_operators_of_the_newest_torch_are_overridden() -> None:
    modules = host_stubs.contract("torch")["modules"]
    called = {
        name for function in modules["torch.nn.attention.varlen"].values() for name in function[OPERATORS]
    }
    assert called <= OVERRIDDEN
