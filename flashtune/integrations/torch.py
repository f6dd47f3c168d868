"""Serves torch's attention by flashtune where it is faster.

    import flashtune.integrations.torch

    flashtune.integrations.torch.activate()

Calls of `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` are then served by
flashtune if its kernels are prepared and were measured as faster. Other calls go to torch's operators.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.library import Library
from torch.nn import Module
from torch.nn import attention as torch_attention

from flashtune.core.errors import UsageError
from flashtune.integrations.flash_operators import FlashBackward, FlashForward, FlashForwardInto
from flashtune.integrations.operator_overrides import (
    BackwardOperator,
    ForwardOperator,
    Kernel,
    backward_override,
    disabled,
    enter_disabled,
    forget,
    forward_override,
    leave_disabled,
)
from flashtune.integrations.sdpa_operators import CUDNN, EFFICIENT, DenseBackward, DenseForward
from flashtune.runtime.deferred import warm_up

__all__ = ["Activation", "activate", "deactivate", "disable_for", "disabled", "is_active"]

NEEDED = "torch >= 2.11"
KEY = "CUDA"

FORWARD: tuple[ForwardOperator, ...] = (DenseForward(CUDNN), DenseForward(EFFICIENT))
BACKWARD: tuple[BackwardOperator, ...] = (DenseBackward(CUDNN), DenseBackward(EFFICIENT))
FLASH_FORWARD: tuple[ForwardOperator, ...] = (FlashForward(), FlashForwardInto())
FLASH_BACKWARD: tuple[BackwardOperator, ...] = (FlashBackward(),)

# The number of removed sets of overrides whose kernels stay in memory.
KEPT = 192

_changing = threading.RLock()
# Another thread may have looked a kernel up and wait for Python's lock before it calls it. torch would have
# freed the kernel by then.
_removed: deque[list[Any]] = deque(maxlen=KEPT)


class Overrides:
    """Registered overrides of operators, which `remove` takes away."""

    def __init__(
        self, forward: Sequence[ForwardOperator], backward: Sequence[BackwardOperator], key: str = KEY
    ) -> None:
        """Registers overrides. Operators that this version of torch does not have are left out.

        Raises:
            UsageError: torch has no kernels of an operator for GPUs.
        """
        self._library: Library | None = Library("aten", "IMPL")
        self._kernels: list[Any] = []
        try:
            for one in forward:
                if (original := _original(one.name, key)) is not None:
                    self._register(one.name, forward_override(one, original), key)
            for other in backward:
                if (original := _original(other.name, key)) is not None:
                    self._register(other.name, backward_override(other, original), key)
        except BaseException:
            self.remove()
            raise

    def _register(self, name: str, override: Kernel, key: str) -> None:
        assert self._library is not None
        with warnings.catch_warnings():
            # torch warns of the first override.
            warnings.simplefilter("ignore")
            self._library.impl(name, override, key, with_keyset=True)
        self._kernels.append(torch.library.get_kernel(getattr(torch.ops.aten, name).default, key))

    @property
    def are_registered(self) -> bool:
        """Whether they were not removed yet."""
        return self._library is not None

    def remove(self) -> None:
        """Restores torch's operators."""
        _removed.append(self._kernels)
        # torch removes the kernels of a library that nothing refers to.
        self._library = None


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
        """Registers flashtune under the names.

        Raises:
            UsageError: This version of torch has another registry.
        """
        # The registry has no public way to read an implementation.
        registered = vars(torch_attention._registry).get("_FLASH_ATTENTION_IMPLS")
        if registered is None:
            raise UsageError(
                f"torch {torch.__version__} is too new: install an older one or a newer flashtune"
            )
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


def activate(*, names: Sequence[str] = ("flashtune",)) -> Activation:
    """Serves torch's attention by flashtune from now on. It is also a context manager.

    A second call does nothing, and its context neither.

    Args:
        names: Names under which flashtune is registered in torch's registry of FlashAttention
            implementations. `("FA3",)` lets torchtitan use it, which activates this name by itself.

    Raises:
        UsageError: torch is too old or has no attention operators for GPUs.
    """
    global _dense, _names
    with _changing:
        if _dense is not None:
            return Activation(began=False)
        if not (
            hasattr(torch_attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")
        ):
            raise UsageError(f"torch {torch.__version__} has no registry of attention: install {NEEDED}")
        if not names:
            raise UsageError("names is empty: pass at least one, such as ('flashtune',)")
        dense = Overrides(FORWARD, BACKWARD, KEY)
        try:
            registered = RegisteredNames(names)
        except BaseException:
            dense.remove()
            raise
        _dense, _names = dense, registered
        warm_up()
        return Activation(began=True)


def deactivate() -> None:
    """Restores torch's operators. Backward passes of earlier calls then run torch's operators too.

    torch does not guard its table of operators against calls of other threads. Let them finish first.
    """
    global _dense, _names
    with _changing:
        if _dense is None or _names is None:
            return
        dense, names = _dense, _names
        _dense, _names = None, None
        forget()
        dense.remove()
        names.remove()


def is_active() -> bool:
    """Whether flashtune is active."""
    return _dense is not None


class DisabledModule:
    """Hooks that pass on the calls of a module. `remove` ends this."""

    def __init__(self, module: Module) -> None:
        self._hooks = (
            module.register_forward_pre_hook(lambda *_: enter_disabled(), prepend=True),
            module.register_forward_hook(lambda *_: leave_disabled(), always_call=True),
        )

    def remove(self) -> None:
        """Lets flashtune serve the module again."""
        for hook in self._hooks:
            hook.remove()


def disable_for(module: Module) -> DisabledModule:
    """Passes the calls of a module and its submodules on to torch's operators, until `remove` of the result.

    It does not affect compiled modules. Compile them after a call of `deactivate`.
    """
    return DisabledModule(module)


def _original(name: str, key: str) -> Kernel | None:
    """Returns the kernel that an operator has now. None if this version of torch has no such operator.

    Raises:
        UsageError: torch has the operator and no kernel.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        raise UsageError(f"this build of torch has no aten::{name} for {key}: install one for GPUs")
    return torch.library.get_kernel(packet.default, key).call_boxed
