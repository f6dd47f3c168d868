"""Tests of overrides: their activation, their removal, and the calls that they pass on."""

import copy
import gc
import io
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from flashtune import UsageError
from flashtune.core.errors import MachineError
from flashtune.integrations import operator_overrides
from flashtune.integrations import torch as integration
from flashtune.runtime import session
from flashtune.runtime.session import SESSION
from tests.support.attention_operators import CUDNN, EFFICIENT, FLASH, Originals, registered

pytestmark = pytest.mark.filterwarnings("error::flashtune.FlashtuneWarning")
aten = torch.ops.aten
NAMES = (CUDNN, f"{CUDNN}_backward", EFFICIENT, f"{EFFICIENT}_backward", FLASH, "_flash_attention_backward")


@pytest.fixture
def originals() -> Iterator[Originals]:
    SESSION.forget()
    with registered() as kernels:
        yield kernels
        integration.deactivate()


@pytest.fixture
def registry(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Torch's registry of implementations, without any."""
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    with mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS, clear=True):
        yield _registry._FLASH_ATTENTION_IMPLS


class Handle:
    """The handle of another implementation."""

    changes: list[str]

    def __init__(self) -> None:
        self.changes.append("added")

    def remove(self) -> None:
        self.changes.append("removed")


def register(name: str) -> list[str]:
    """Activates another implementation. Returns its changes, which are in order of time."""
    Handle.changes = []
    torch_attention.register_flash_attention_impl(name, register_fn=Handle)
    torch_attention.activate_flash_attention_impl(name)
    return Handle.changes


def attend(q: Tensor) -> Tensor:
    out: Tensor = aten._scaled_dot_product_cudnn_attention(q, q, q, None, False)[0]
    return out


def overridden() -> dict[str, bool]:
    """Whether the present kernel of each operator is another one than the original."""
    dumps = {name: torch._C._dispatch_dump(f"aten::{name}") for name in NAMES}
    return {
        name: dump.count("CPU: registered at") + dump.count("CPU (inactive)") > 1
        for name, dump in dumps.items()
    }


def test_activation_survives_a_failed_warm_up(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise MachineError("Triton has no ptxas")

    monkeypatch.setattr(session, "current_versions", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activation = integration.activate()
    with activation:
        assert integration.is_active()
    assert not integration.is_active()


def test_all_operators_are_overridden_and_restored(originals: Originals) -> None:
    assert set(overridden().values()) == {False}
    integration.activate()
    assert integration.is_active()
    assert set(overridden().values()) == {True}
    assert torch_attention.current_flash_attention_impl() == "flashtune"
    integration.deactivate()
    assert not integration.is_active()
    assert set(overridden().values()) == {False}
    assert torch_attention.current_flash_attention_impl() is None
    integration.deactivate()


def test_a_context_ends_only_what_it_began(originals: Originals) -> None:
    with integration.activate():
        with integration.activate():
            assert integration.is_active()
        assert integration.is_active()
    assert not integration.is_active()
    integration.activate()
    with pytest.raises(KeyError), integration.activate():
        raise KeyError
    assert integration.is_active()
    integration.deactivate()
    with pytest.raises(KeyError), integration.activate():
        raise KeyError
    assert not integration.is_active()


def test_another_name_is_taken(registry: dict[str, Any]) -> None:
    integration.activate(names=("FA3", "flashtune"))
    assert torch_attention.current_flash_attention_impl() == "FA3"
    # As torchtitan does.
    torch_attention.activate_flash_attention_impl("FA3")
    assert set(overridden().values()) == {True}
    integration.deactivate()
    assert set(overridden().values()) == {False}
    assert registry == {}
    with pytest.raises(UsageError, match="names is empty"):
        integration.activate(names=())
    with pytest.raises(UsageError, match="names has 'nope', which no program activates: pass 'FA2' or"):
        integration.activate(names=("flashtune", "nope"))
    with integration.activate(names="flashtune"):
        assert torch_attention.current_flash_attention_impl() == "flashtune"


def test_another_implementation_is_left_alone(registry: dict[str, Any]) -> None:
    integration.activate()
    changes = register("other")
    assert overridden()[CUDNN]
    assert not overridden()[FLASH]
    integration.deactivate()
    assert torch_attention.current_flash_attention_impl() == "other"
    assert changes == ["added"]


@pytest.mark.parametrize("names", [("FA3",), ("flashtune", "FA3"), ("flashtune",)])
def test_the_implementation_from_before_returns(registry: dict[str, Any], names: tuple[str, ...]) -> None:
    changes = register("FA3")
    with integration.activate(names=names):
        assert torch_attention.current_flash_attention_impl() == names[0]
        assert changes == ["added", "removed"]
    assert registry == {"FA3": Handle}
    assert torch_attention.current_flash_attention_impl() == "FA3"
    assert changes == ["added", "removed", "added"]


def test_an_implementation_of_the_same_name_is_left_alone(registry: dict[str, Any]) -> None:
    with integration.activate(names=("FA3",)):
        changes = register("FA3")
    assert registry == {"FA3": Handle}
    assert torch_attention.current_flash_attention_impl() == "FA3"
    assert changes == ["added"]


def test_a_failed_activation_restores_the_registry(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("FA3")
    monkeypatch.setattr(integration, "FLASH_FORWARD", (None,))
    with pytest.raises(AttributeError):
        integration.activate()
    assert not integration.is_active()
    assert set(overridden().values()) == {False}
    assert registry == {"FA3": Handle}
    assert torch_attention.current_flash_attention_impl() == "FA3"


def test_a_failed_restoration_leaves_flashtune_inactive(registry: dict[str, Any]) -> None:
    integration.activate()
    names = integration._names
    assert names is not None

    def fail() -> None:
        raise KeyError("its library is gone")

    torch_attention.register_flash_attention_impl("FA3", register_fn=fail)
    names._active = "FA3"
    with pytest.raises(KeyError, match="its library is gone"):
        integration.deactivate()
    assert not integration.is_active()
    assert set(overridden().values()) == {False}
    with integration.activate():
        assert integration.is_active()


def test_another_registry_of_torch_is_an_error(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_registry, "_FLASH_ATTENTION_IMPLS")
    with pytest.raises(UsageError, match="is too new"):
        integration.activate()
    assert set(overridden().values()) == {False}


def test_many_activations_leave_nothing(originals: Originals) -> None:
    q = torch.randn(1, 2, 4, 16, dtype=torch.bfloat16)
    want = attend(q)
    objects = 0
    for number in range(400):
        with integration.activate():
            if number % 100 == 0:
                assert torch.equal(attend(q), want)
        if number == 100:
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
    assert torch.equal(attend(q), want)
    assert set(overridden().values()) == {False}
    assert originals.calls[CUDNN] == 6


def test_threads_may_activate_and_call(originals: Originals) -> None:
    q = torch.randn(1, 2, 4, 16, dtype=torch.bfloat16)
    want = attend(q)

    def activations() -> None:
        for _ in range(50):
            with integration.activate():
                pass

    def calls() -> int:
        return sum(not torch.equal(attend(q), want) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run) for run in (activations, calls, activations, calls)]
    # `result` raises what a thread raised.
    assert [run.result() for run in runs] == [None, 0, None, 0]
    integration.deactivate()
    assert set(overridden().values()) == {False}


def test_a_kernel_outlives_its_removal(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may wait for Python's lock between its look-up of a kernel and the call."""
    monkeypatch.setattr(SESSION, "removed_kernels", deque(maxlen=4))
    with integration.activate():
        pass
    first = [weakref.ref(kernel) for kernels in SESSION.removed_kernels for kernel in kernels]
    gc.collect()
    assert first
    assert all(reference() is not None for reference in first)
    for _ in range(4):
        with integration.activate():
            pass
    gc.collect()
    assert all(reference() is None for reference in first)


@pytest.fixture
def asked(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that looked up a kind of call."""
    names: list[str] = []
    entry = SESSION.entry

    def noted(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return entry(*args)

    monkeypatch.setattr(SESSION, "entry", noted)
    return names


def test_disabled_is_for_one_thread(asked: list[str]) -> None:
    q = torch.randn(1, 2, 4, 16)
    with integration.activate():
        with integration.disabled(), integration.disabled():
            attend(q)
            assert not asked
            other = threading.Thread(target=attend, args=(q,), name="other")
            other.start()
            other.join()
        # Another kind of call: this one is refused without another look-up.
        attend(torch.randn(1, 2, 5, 16))
    assert asked == ["other", threading.current_thread().name]
    assert not operator_overrides.is_paused()


class Layer(torch.nn.Module):
    """Calls a function in its forward pass, and notes whether calls are passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_on: list[bool] = []

    def forward(self, inside: Callable[[], object] = lambda: None) -> None:
        self.passed_on.append(operator_overrides.is_paused())
        inside()
        self.passed_on.append(operator_overrides.is_paused())


def copied(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module)


def saved(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("way", [copied, saved])
def test_a_disabled_module_can_be_copied_and_saved(way: Callable[[torch.nn.Module], Any]) -> None:
    module = Layer()
    switch = integration.disable_for(module)
    other = way(module)
    switch.remove()
    for layer in (module, other):
        layer()
    assert (module.passed_on, other.passed_on) == ([False, False], [True, True])
    assert not operator_overrides.is_paused()


def test_hooks_can_be_removed_inside_of_the_forward_pass() -> None:
    module = Layer()
    switch = integration.disable_for(module)
    module(switch.remove)
    assert module.passed_on == [True, False]
    module()
    assert module.passed_on == [True, False, False, False]


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_error_ends_what_a_module_began(kind: type[BaseException]) -> None:
    module = Layer()
    integration.disable_for(module)

    def fails() -> None:
        raise kind

    with pytest.raises(kind):
        module(fails)
    assert not operator_overrides.is_paused()
    module()
    assert module.passed_on == [True, True, True]
    assert not operator_overrides.is_paused()


def test_a_module_that_calls_itself_stays_disabled() -> None:
    module = Layer()
    integration.disable_for(module)
    integration.disable_for(module)

    def fails() -> None:
        with pytest.raises(KeyError):
            module({}.popitem)

    module(fails)
    assert module.passed_on == [True, True, True]
    assert not operator_overrides.is_paused()


def test_generators_end_only_what_they_began() -> None:
    def generator() -> Generator[None, None, None]:
        with integration.disabled():
            yield

    first, second = generator(), generator()
    next(first)
    next(second)
    first.close()
    assert operator_overrides.is_paused()
    # The last reference may go in another thread.
    thread = threading.Thread(target=second.close)
    thread.start()
    thread.join()
    assert not operator_overrides.is_paused()


def test_only_modules_can_be_disabled() -> None:
    with pytest.raises(TypeError, match="disable_for takes a module and was given a int: pass a"):
        integration.disable_for(3)  # type: ignore[arg-type]


def test_an_override_below_can_be_taken_away(originals: Originals) -> None:
    q = torch.randn(1, 2, 4, 16)
    library = torch.library.Library("aten", "IMPL")
    calls = []

    def below(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return originals.cudnn(*args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(CUDNN, below, "CPU")
    with integration.activate():
        attend(q)
        assert len(calls) == 1
        library._destroy()
        for count in (2, 3):
            attend(q)
            assert originals.calls[CUDNN] == count
        assert overridden()[CUDNN]
    attend(q)
    assert originals.calls[CUDNN] == 4
    assert not overridden()[CUDNN]


def test_a_refused_call_is_not_read_again(asked: list[str]) -> None:
    # Without the interpreter nothing is computed on the CPU, so that all calls are passed on.
    q = torch.randn(1, 2, 4, 16)
    with integration.activate():
        for _ in range(3):
            attend(q)
        assert len(asked) == 1
        for seqlen in range(5, 15):
            attend(torch.randn(1, 2, seqlen, 16))
        SESSION.forget()
        attend(q)
    assert len(asked) == 12


def test_a_build_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "KEY", "HPU")  # no build has kernels for these devices
    with pytest.raises(UsageError, match="install one for GPUs"):
        integration.activate()
    assert not integration.is_active()
    monkeypatch.delattr(torch_attention, "register_flash_attention_impl")
    with pytest.raises(UsageError, match=r"install torch >= 2\.11"):
        integration.activate()
