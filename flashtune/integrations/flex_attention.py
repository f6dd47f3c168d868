"""Serves torch's `flex_attention` by flashtune.

    import flashtune.integrations.flex_attention

    flashtune.integrations.flex_attention.activate()

`torch.nn.attention.flex_attention.flex_attention` is then `flashtune.flex_attention`, also in compiled
programs, and in transformers' models with `attn_implementation="flex_attention"`. Calls that flashtune does
not compute go to torch's function.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from flashtune.api.flex_attention import flex_attention as own_attention
from flashtune.core.errors import KernelError, ProblemError
from flashtune.core.notices import warn_once
from flashtune.integrations.host_library import host_library
from flashtune.recording.callers import called_by
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import is_compiling, is_tracing, runs_eagerly

__all__ = ["Activation", "activate", "deactivate", "is_active"]

MODULE, NAME, NEEDED = "torch.nn.attention.flex_attention", "flex_attention", "2.11"
TRANSFORMERS, COMPILED = "transformers.integrations.flex_attention", "compile_friendly_flex_attention"
# Devices on which flashtune serves. Tests replace it by the CPU.
DEVICES = {"cuda"}
# Native kernels compute gradients on GPUs of this compute capability, of these types and head dims.
HOPPER, NATIVE_DTYPES = (9, 0), (torch.bfloat16, torch.float16)
LEAST_DIM, NATIVE_DIM, DIM_STEP = 16, 128, 8
# Refusals that are counted, and the sentence under which further ones are.
MAX_SENTENCES, OTHERS = 256, "other refusals"

Function = Callable[..., Any]


class Activation:
    """Torch's function replaced by flashtune's. As a context manager, it deactivates at its end.

    Attributes:
        served: Number of calls that flashtune computed.
        refused: Number of calls that torch's function computed, by the reason.
    """

    def __init__(self, module: Any) -> None:
        self.served = 0
        self.refused: Counter[str] = Counter()
        self._module = module
        self._original: Function = getattr(module, NAME)
        self._compiled: Function | None = None
        self._transformers: ModuleType | None = None
        self._original_compiled: Function | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _active is self:
            deactivate()

    def begin(self) -> None:
        """Replaces the functions. Transformers' module has its own compiled one, if it is imported."""
        setattr(self._module, NAME, _flex_attention)
        loaded = sys.modules.get(TRANSFORMERS)
        original = getattr(loaded, COMPILED, None)
        if loaded is not None and original is not None:

            def compile_friendly_flex_attention(*tensors: Any, training: bool = False, **options: Any) -> Any:
                def other(*tensors: Tensor, **options: Any) -> Any:
                    return original(*tensors, training=training, **options)

                return self.attention(other, *tensors, **options)

            self._transformers, self._original_compiled = loaded, original
            setattr(loaded, COMPILED, torch.compiler.disable(compile_friendly_flex_attention))

    def end(self) -> None:
        """Restores the functions, also in modules of transformers that were imported since."""
        for module in (self._module, sys.modules.get(TRANSFORMERS)):
            if module is not None and getattr(module, NAME, None) is _flex_attention:
                setattr(module, NAME, self._original)
        if self._transformers is not None:
            setattr(self._transformers, COMPILED, self._original_compiled)

    def from_eager(self, *arguments: Any, **options: Any) -> Any:
        """Computes a call of an eager program."""
        return self.attention(self._original, *arguments, **options)

    def from_compiled(self, *arguments: Any, **options: Any) -> Any:
        """Computes a call of a compiled program. Calls that flashtune refuses are compiled by torch."""
        if self._compiled is None:
            self._compiled = _compiled(self._original)
        return self.attention(self._compiled, *arguments, **options)

    def attention(
        self,
        other: Function,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """Returns flashtune's result, or that of another function if flashtune refuses the call.

        `kernel_options` change no results, and flashtune ignores them.
        """
        reason = _reason(query, key, value, return_aux)
        if reason is None:
            has_lse: Any = return_lse if return_aux is None else return_aux.lse
            try:
                result = _served(query, key, value, score_mod, block_mask, scale, enable_gqa, has_lse)
            except (ProblemError, KernelError) as error:
                reason = str(error)
            else:
                self.served += 1
                if return_aux is None:
                    return result
                out, lse = result if return_aux.lse else (result, None)
                return out, self._module.AuxOutput(lse=lse)
        self._note(reason)
        passed = {"kernel_options": kernel_options, "return_aux": return_aux}
        options = {name: option for name, option in passed.items() if option is not None}
        own = score_mod, block_mask, scale, enable_gqa, return_lse
        return other(query, key, value, *own, **options)

    def _note(self, reason: str) -> None:
        is_new = reason not in self.refused
        self.refused[reason if not is_new or len(self.refused) < MAX_SENTENCES else OTHERS] += 1
        if is_new:
            warn_once("flex_attention", f"torch's flex_attention serves calls: {reason}")


_active: Activation | None = None


def activate() -> Activation:
    """Serves torch's `flex_attention` by flashtune from now on. The result is also a context manager.

    A second call returns the present activation. Names that other modules imported from torch's module
    before, except in transformers, keep torch's function.

    Raises:
        UsageError: torch is too old.
    """
    global _active  # noqa: PLW0603 (one function of torch)
    with SESSION.changing:
        if _active is None:
            _active = Activation(host_library(MODULE, NEEDED))
            _active.begin()
        return _active


def deactivate() -> None:
    """Restores torch's function."""
    global _active  # noqa: PLW0603 (one function of torch)
    with SESSION.changing:
        if _active is not None:
            _active.end()
            _active = None


def is_active() -> bool:
    """Returns whether flashtune is active."""
    return _active is not None


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
    """Returns attention, in place of torch's function and with its arguments."""
    if is_compiling():
        # The graph breaks here. Compiled programs keep the function also after the end of an activation.
        return torch.compiler.disable(_from_compiled)(query, key, value, *arguments, **options)
    active = _active
    return (_torchs() if active is None else active.from_eager)(query, key, value, *arguments, **options)


def _from_compiled(*arguments: Any, **options: Any) -> Any:
    active = _active
    return (_compiled(_torchs()) if active is None else active.from_compiled)(*arguments, **options)


def _compiled(function: Function) -> Function:
    """Returns torch's function compiled. Torch's kernels do not take float64, so such calls run eagerly."""
    compiled = torch.compile(function)

    def run(query: Tensor, *arguments: Any, **options: Any) -> Any:
        return (function if query.dtype is torch.float64 else compiled)(query, *arguments, **options)

    return run


def _torchs() -> Function:
    """Returns torch's function, which is restored."""
    function: Function = getattr(sys.modules[MODULE], NAME)
    return function


def _reason(query: Tensor, key: Tensor, value: Tensor, return_aux: Any) -> str | None:
    """Returns why torch's function computes a call whatever its functions are, or None."""
    if query.device.type not in DEVICES:
        return f"the tensors are on {query.device.type}"
    if is_tracing() or not runs_eagerly(query, key, value):
        return "a dispatch mode or transform is active"
    needs_gradients = any(tensor.requires_grad for tensor in (query, key, value))
    if needs_gradients and torch.is_grad_enabled() and not _has_fast_gradients(query, value):
        return "torch's kernels are faster if an input requires grad"
    if return_aux is not None and return_aux.max_scores:
        return "return_aux asks for the largest scores"
    return None


def _has_fast_gradients(query: Tensor, value: Tensor) -> bool:
    """Returns whether kernels compute gradients faster than torch's. On a CPU, tests compute all calls."""
    if query.device.type != "cuda":
        return True
    if torch.are_deterministic_algorithms_enabled():
        # Native kernels add in no fixed order with block masks, which most functions have.
        return False
    is_native = torch.cuda.get_device_capability(query.device) == HOPPER
    dims = query.shape[-1], value.shape[-1]
    fits = min(dims) >= LEAST_DIM and max(dims) <= NATIVE_DIM and not any(dim % DIM_STEP for dim in dims)
    return is_native and query.dtype in NATIVE_DTYPES and fits


_served = called_by("flex_attention")(own_attention)
