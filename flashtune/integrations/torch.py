"""Serves torch's attention by flashtune where it is faster.

    import flashtune.integrations.torch

    flashtune.integrations.torch.activate()

Calls of `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` are then served by
flashtune if its kernels are prepared and were measured as faster. Other calls go to torch's operators.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.library import Library
from torch.nn import Module
from torch.nn import attention as torch_attention

from flashtune.core.arguments import kind_of, shown
from flashtune.core.errors import UsageError
from flashtune.integrations.flash_operators import (
    CudnnBackward,
    CudnnForward,
    CudnnForwardInto,
    FlashBackward,
    FlashForward,
    FlashForwardInto,
    has_known_results,
)
from flashtune.integrations.operator_overrides import (
    BackwardOperator,
    ForwardOperator,
    Kernel,
    Pause,
    backward_override,
    begin_pause,
    disabled,
    end_pause,
    forward_override,
    last_pause,
)
from flashtune.integrations.sdpa_operators import CUDNN, EFFICIENT, DenseBackward, DenseForward
from flashtune.runtime.session import SESSION

__all__ = ["Activation", "activate", "deactivate", "disable_for", "disabled", "is_active"]

NEEDED = "torch >= 2.11"
KEY = "CUDA"
# In the error of a kernel that its library has taken away.
INVALID = "has been invalidated"
# The name under which flashtune is registered by default, and those of torch, which may not be imported yet.
NAME, KNOWN = "flashtune", ("FA2", "FA3", "FA4")

FORWARD: tuple[ForwardOperator, ...] = (
    DenseForward(CUDNN),
    DenseForward(EFFICIENT),
    CudnnForward(),
    CudnnForwardInto(),
)
BACKWARD: tuple[BackwardOperator, ...] = (DenseBackward(CUDNN), DenseBackward(EFFICIENT), CudnnBackward())
FLASH_FORWARD: tuple[ForwardOperator, ...] = (FlashForward(), FlashForwardInto())
FLASH_BACKWARD: tuple[BackwardOperator, ...] = (FlashBackward(),)


class Overrides:
    """Registered overrides of operators, which `remove` takes away."""

    def __init__(
        self, forward: Sequence[ForwardOperator], backward: Sequence[BackwardOperator], key: str = KEY
    ) -> None:
        """Registers overrides. Operators that this version of torch does not have are left out."""
        self._key = key
        # One library for each operator, so that one override can be renewed.
        self._libraries: dict[str, Library] = {}
        self._overrides: dict[str, Kernel] = {}
        self._kernels: list[Any] = []
        try:
            for override in forward:
                if (original := self._original(override.name)) is not None:
                    self._register(override.name, forward_override(override, original))
            for other in backward:
                if (original := self._original(other.name)) is not None:
                    self._register(other.name, backward_override(other, original))
        except BaseException:
            self.remove()
            raise

    def _original(self, name: str) -> Kernel | None:
        """Returns a function that calls the overridden kernel of an operator.

        The kernel may be that of another library, which takes it away later. Then the one below it is called.
        """
        first = _original(name, self._key)
        if first is None:
            return None
        current: Kernel = first

        def call(*args: Any, **options: Any) -> Any:
            nonlocal current
            kernel = current
            try:
                return kernel(*args, **options)
            except RuntimeError as failure:
                if INVALID not in str(failure):
                    raise
            with SESSION.changing:
                if current is kernel:
                    current = self._renewed(name)
            return current(*args, **options)

        return call

    def _register(self, name: str, override: Kernel) -> None:
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns of the first override.
            warnings.simplefilter("ignore")
            library.impl(name, override, self._key, with_keyset=True)
        self._libraries[name] = library
        self._overrides[name] = override
        self._kernels.append(torch.library.get_kernel(getattr(torch.ops.aten, name).default, self._key))

    def _renewed(self, name: str) -> Kernel:
        """Registers an override again, above the kernel that is below it now, and returns that kernel."""
        # torch removes the kernels of a library that nothing refers to.
        was_registered = self._libraries.pop(name, None) is not None
        original = _original(name, self._key)
        assert original is not None
        if was_registered:
            self._register(name, self._overrides[name])
        return original

    @property
    def are_registered(self) -> bool:
        """Whether they were not removed yet."""
        return bool(self._libraries)

    def remove(self) -> None:
        """Restores torch's operators."""
        SESSION.removed_kernels.append(self._kernels)
        # The kernels refer to this object, through objects that Python's collector does not see.
        self._kernels = []
        self._libraries.clear()
        self._overrides.clear()


class Activation:
    """The context of an activation. Its end deactivates what its start activated."""

    def __init__(self, began: bool) -> None:
        self._began = began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._began:
            deactivate()


class RegisteredNames:
    """Names in torch's registry of FlashAttention implementations, the first of them active.

    `remove` restores their earlier implementations and the one that was active before.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Registers flashtune under the names."""
        # The registry has no public way to read an implementation.
        registered = vars(torch_attention._registry).get("_FLASH_ATTENTION_IMPLS")
        if registered is None:
            raise UsageError(
                f"torch {torch.__version__} is too new: install an older one or a newer flashtune"
            )
        accepted = sorted({NAME, *KNOWN, *registered})
        for name in names:
            if name not in accepted:
                words = " or ".join(map(repr, accepted))
                raise UsageError(f"names has {shown(name)}, which no program activates: pass {words}")
        self._registered: dict[str, Callable[..., Any]] = registered
        self._earlier = {name: registered.get(name) for name in names}
        self._active = torch_attention.current_flash_attention_impl()
        self._overrides: Overrides | None = None
        try:
            for name in names:
                torch_attention.register_flash_attention_impl(name, register_fn=self._activated)
            torch_attention.activate_flash_attention_impl(names[0])
        except BaseException:
            self._restore_names()
            # torch removed the earlier implementation before it called this one.
            if torch_attention.current_flash_attention_impl() is None:
                self._restore_active()
            raise

    def _activated(self) -> Overrides:
        self._overrides = Overrides(FLASH_FORWARD, FLASH_BACKWARD, KEY)
        return self._overrides

    def remove(self) -> None:
        """Restores the registry. Implementations that were registered or activated later stay."""
        is_active = self._overrides is not None and self._overrides.are_registered
        if is_active:
            torch_attention.restore_flash_attention_impl()
        self._restore_names()
        if is_active:
            self._restore_active()

    def _restore_names(self) -> None:
        for name, earlier in self._earlier.items():
            if self._registered.get(name) != self._activated:
                continue
            if earlier is None:
                del self._registered[name]
            else:
                torch_attention.register_flash_attention_impl(name, register_fn=earlier)

    def _restore_active(self) -> None:
        if self._active is not None and self._active in self._registered:
            torch_attention.activate_flash_attention_impl(self._active)


_dense: Overrides | None = None
_names: RegisteredNames | None = None


def activate(*, names: str | Sequence[str] = NAME) -> Activation:
    """Serves torch's attention by flashtune from now on. It is also a context manager.

    A second call does nothing, and its context neither.

    Args:
        names: One name or several under which flashtune is registered in torch's registry of FlashAttention
            implementations: "flashtune", or names that torch knows. "FA3" lets torchtitan use it, which
            activates this name by itself.

    Raises:
        UsageError: torch is too old or has no attention operators for GPUs, or a name is not known.
    """
    global _dense, _names
    with SESSION.changing:
        if _dense is not None:
            return Activation(began=False)
        if not (
            hasattr(torch_attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")
        ):
            raise UsageError(f"torch {torch.__version__} has no registry of attention: install {NEEDED}")
        names = (names,) if isinstance(names, str) else names
        if not names:
            raise UsageError("names is empty: pass at least one, such as ('flashtune',)")
        dense = Overrides(FORWARD, BACKWARD, KEY)
        try:
            registered = RegisteredNames(names)
        except BaseException:
            dense.remove()
            raise
        _dense, _names = dense, registered
        SESSION.warm_up()
        return Activation(began=True)


def deactivate() -> None:
    """Restores torch's operators. Backward passes of earlier calls then run torch's operators too.

    torch does not guard its table of operators against calls of other threads. Let them finish first.
    """
    global _dense, _names
    with SESSION.changing:
        if _dense is None or _names is None:
            return
        dense, names = _dense, _names
        _dense, _names = None, None
        SESSION.forget_operators()
        dense.remove()
        names.remove()


def is_active() -> bool:
    """Whether flashtune is active."""
    return _dense is not None


class PausingHooks:
    """Hooks of a module that pass on its calls. They are copied and saved with the module."""

    def __init__(self) -> None:
        # The present calls of the module, in all threads.
        self.pauses: list[Pause] = []

    def __reduce__(self) -> tuple[type[PausingHooks], tuple[()]]:
        return PausingHooks, ()

    def begin(self, *_: object) -> None:
        """Begins to pass on calls."""
        if not torch.compiler.is_compiling():
            self.pauses.append(begin_pause(self, sys._getframe(1)))

    def end(self, *_: object) -> None:
        """Ends the last pause that `begin` began in this context, unless the hooks were removed since."""
        pause = None if torch.compiler.is_compiling() else last_pause(self)
        if pause is not None:
            self.pauses.remove(pause)
            end_pause(pause)


class DisabledModule:
    """A module whose calls are passed on. `remove` ends this."""

    def __init__(self, module: Module) -> None:
        self._hooks = PausingHooks()
        self._handles = (
            module.register_forward_pre_hook(self._hooks.begin, prepend=True),
            module.register_forward_hook(self._hooks.end, always_call=True),
        )

    def remove(self) -> None:
        """Lets flashtune serve the module again, also the rest of its present calls, but not its copies."""
        for handle in self._handles:
            handle.remove()
        while self._hooks.pauses:
            end_pause(self._hooks.pauses.pop())


def disable_for(module: Module) -> DisabledModule:
    """Passes the calls of a module and its submodules on to torch's operators, until `remove` of the result.

    Copies of the module are passed on too. It does not affect compiled modules. Compile them after a call of
    `deactivate`.

    Raises:
        TypeError: The argument is not a module.
    """
    if not isinstance(module, Module):
        raise TypeError(f"disable_for takes a module and was given {kind_of(module)}: pass a torch.nn.Module")
    return DisabledModule(module)


def _original(name: str, key: str) -> Kernel | None:
    """Returns the kernel that an operator has now. None if this version of torch has no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not has_known_results(name):
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        raise UsageError(f"this build of torch has no aten::{name} for {key}: install one for GPUs")
    return torch.library.get_kernel(packet.default, key).call_boxed
