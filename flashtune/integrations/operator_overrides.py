"""Overrides of torch's attention operators, which pass calls on unless kernels are prepared and faster.

An override runs below autograd, with tensors that have memory. It never changes a call that it passes on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.caches import keep
from flashtune.core.features.records import ExtraInputs
from flashtune.core.notices import warn_once
from flashtune.launch.launcher import current_device
from flashtune.launch.workspaces import allocator
from flashtune.request.call import Call, Options
from flashtune.request.gradients import BackwardInputs, Gradients
from flashtune.request.request import Executor, Result
from flashtune.runtime.buckets import Passes
from flashtune.runtime.session import SESSION, Session

# The address of a served call's first random state, modulo a number that divides those of other states.
# Compilers assert that it is a multiple of 16.
MARK, MEMORY_ALIGNMENT = 16, 64

# Bound once, because each call uses it.
same_bits = torch.are_deterministic_algorithms_enabled
# Queries, keys, values and extra inputs of a call, in its layout.
Inputs = tuple["Tensor", "Tensor", "Tensor", "ExtraInputs"]
# A kernel of an operator, called with the dispatcher's keys and then the operator's arguments.
Kernel = Callable[..., Any]
# Properties of calls that an override passes on.
Refused = dict[tuple[object, ...], bool]

# The reasons to pass calls on in this context.
_pauses: ContextVar[tuple[Pause, ...]] = ContextVar("flashtune_pauses", default=())
# Bound once, because each call uses it.
pauses_here = _pauses.get


class Pause:
    """One reason to pass calls on. Contexts that have a copy of it see its end too.

    Attributes:
        owner: The hooks that began it, or None.
        frame: The call of the module, which Ctrl-C may end without its last hooks. None without hooks.
        is_over: Whether it has ended.
    """

    __slots__ = ("frame", "is_over", "owner")

    def __init__(self, owner: object = None, frame: FrameType | None = None) -> None:
        self.owner = owner
        self.frame = frame
        self.is_over = False

    @property
    def is_active(self) -> bool:
        """Whether it has not ended. Its module's call is one of the present calls of this thread."""
        if self.is_over or self.frame is None:
            return not self.is_over
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class Reading(NamedTuple):
    """A call of an operator as flashtune computes it."""

    call: Call
    needs_grad: bool  # Whether a backward pass may follow.
    # Name of the replaced operator in records, or None if it has no measurements.
    usual: str | None


class Served(NamedTuple):
    """A kind of call that is served: the executor of its forward pass, and its options."""

    forward: Executor
    options: Options


class ForwardOperator(Protocol):
    """A forward operator."""

    name: str  # Its name in the library `aten`.
    flags: int  # The number of arguments after the fourth that are not numbers.
    has_options: bool  # Whether calls differ by options, and by whether gradients are recorded.
    # Whether calls without a fifth argument, which begins packed sequences, are passed on.
    is_packed: bool

    def read(self, args: tuple[Any, ...], options: dict[str, Any], /) -> Reading | None:
        """Returns the call, or None if flashtune does not compute such calls of the operator."""
        ...

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, other: Tensor | None, known: Options, /
    ) -> Inputs | None:
        """Returns the inputs of a later call with the same options. None if each call must be read."""
        ...

    def results(self, result: Result, args: tuple[Any, ...], options: Options, /) -> Any:
        """Returns the operator's results from those of a kernel for a call with these options."""
        ...


class BackwardOperator(Protocol):
    """A backward operator."""

    name: str  # Its name in the library `aten`.

    def read(self, args: tuple[Any, ...], options: dict[str, Any], /) -> Reading | None:
        """Returns the forward call, or None if flashtune does not compute its gradients."""
        ...

    def saved(self, args: tuple[Any, ...], reading: Reading, /) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the log-sum-exp and the gradient of the output, in the call's layout."""
        ...

    def results(self, gradients: Gradients, reading: Reading, /) -> Any:
        """Returns the operator's results from those of a kernel."""
        ...


def forward_override(operator: ForwardOperator, original: Kernel, session: Session = SESSION) -> Kernel:
    """Returns the override of a forward operator with an original kernel."""
    # Properties of calls that are passed on at once, and the executors of calls that are served.
    refused: Refused
    served: dict[tuple[object, ...], Served]
    refused, served = session.operators.setdefault(operator.name, ({}, {}))
    skipped = operator.flags

    def override(
        keyset: object, q: Tensor, k: Tensor, v: Tensor, other: Tensor | None, *flags: Any, **options: Any
    ) -> Any:
        # These lines are the host time of calls that are passed on.
        other_kind = None if other is None else (other.shape, other.stride(), other.dtype)
        short: tuple[object, ...] = q.shape, k.shape, q.dtype, other_kind, flags[skipped:], same_bits()
        if operator.has_options:
            short = *short, torch.is_grad_enabled(), *_settings(options)
        if short in refused or (pauses_here() and is_paused()):
            return original(keyset, q, k, v, other, *flags, **options)
        args = q, k, v, other, *flags
        scale = options.get("scale")
        strides = q.stride(), k.stride(), v.stride()
        devices = q.device, k.device, v.device, None if other is None else other.device
        key = short, strides, v.shape, k.dtype, v.dtype, devices
        entry = served.get(key)
        if entry is not None and (scale is None or 0.0 <= scale <= MAX_FLOAT32):
            inputs = operator.inputs(q, k, v, other, entry.options)
            if inputs is not None:
                q_, k_, v_, side = inputs
                return operator.results(entry.forward(q_, k_, v_, scale, side), args, entry.options)
        prepared = _known(session, operator, args, options, refused, short)
        if prepared is None:
            return original(keyset, *args, **options)
        reading, passes = prepared
        call = reading.call
        if not session.recordings and operator.inputs(q, k, v, other, call.options) is not None:
            keep(served, key, Served(passes.forward, call.options))
        result = passes.forward(call.q, call.k, call.v, call.scale, call.side)
        return operator.results(result, args, call.options)

    if not operator.is_packed:
        return override

    def packed(keyset: object, *args: Any, **options: Any) -> Any:
        serve = original if args[4] is None else override
        return serve(keyset, *args, **options)

    return packed


def _settings(options: dict[str, Any]) -> Iterator[object]:
    """Yields the names and values of options, without the scale and the values of tensors."""
    for name in sorted(options):
        if name != "scale" and options[name] is not None:
            yield name, options[name] if isinstance(options[name], int) else True


def backward_override(operator: BackwardOperator, original: Kernel, session: Session = SESSION) -> Kernel:
    """Returns the override of a backward operator with an original kernel."""

    def override(keyset: object, *args: Any, **options: Any) -> Any:
        prepared = _known(session, operator, args, options)
        backward = None if prepared is None else prepared[1].backward
        if prepared is None or backward is None:
            return original(keyset, *args, **options)
        reading = prepared[0]
        call = reading.call
        out, lse, dout = operator.saved(args, reading)
        gradients = backward(BackwardInputs(*call[:3], out, lse, dout, None, call.scale, call.side))
        return operator.results(gradients, reading)

    return override


def _known(
    session: Session,
    operator: ForwardOperator | BackwardOperator,
    args: tuple[Any, ...],
    options: dict[str, Any],
    refused: Refused | None = None,
    short: tuple[object, ...] = (),
) -> tuple[Reading, Passes] | None:
    """Returns a call and its executors, or None if it is passed on."""
    try:
        # Another version of torch may have other arguments.
        reading = operator.read(args, options)
        if reading is None:
            return None
        entry = session.entry(reading.call, reading.usual, reading.needs_grad, "torch")
    except Exception as failure:  # noqa: BLE001 - a call must not fail because another operator was tried
        warn_once("override", f"torch's operator serves, because its override failed: {failure!r}")
        return None
    if entry is None:
        return None
    if entry.passes is not None:
        return reading, entry.passes
    # With other strides kernels are no faster, so that these can refuse other calls too.
    if refused is not None and entry.may_be_skipped and entry.has_best_tensors:
        keep(refused, short, True)
    return None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Passes all calls of this thread or task on to torch's operators, with their backward passes.

    Backward passes of packed sequences are not included, because nothing marks the calls that were passed on.
    """
    pause = begin_pause()
    try:
        yield
    finally:
        end_pause(pause)


def begin_pause(owner: object = None, frame: FrameType | None = None) -> Pause:
    """Begins to pass on the calls of this context, and returns the pause, which `end_pause` ends."""
    pause = Pause(owner, frame)
    _pauses.set((*_active_pauses(), pause))
    return pause


def end_pause(pause: Pause) -> None:
    """Ends a pause, of this context or another one. Pauses may end in any order."""
    pause.is_over = True
    _pauses.set(_active_pauses())


def last_pause(owner: object) -> Pause | None:
    """Returns the pause of this context that an owner began last, or None."""
    # The frame of a failed call is gone when the hooks run.
    kept = (pause for pause in reversed(pauses_here()) if not pause.is_over)
    return next((pause for pause in kept if pause.owner is owner), None)


def is_paused() -> bool:
    """Whether calls of this context are passed on."""
    active = _active_pauses()
    _pauses.set(active)
    return bool(active)


def _active_pauses() -> tuple[Pause, ...]:
    return tuple(pause for pause in pauses_here() if pause.is_active)


def random_states(like: Tensor, dtype: torch.dtype, *sizes: int) -> tuple[Tensor, Tensor]:
    """Returns the random states that an operator returns, without values, because nothing is random.

    The address of the first one is a mark, because torch's memory begins at multiples of 64 bytes. The
    backward operator gets it too, which identifies the calls that flashtune served. Each call has its own
    memory, because compilers may write other values there.

    Args:
        like: A tensor on the device.
        dtype: The type of both states.
        sizes: The shape of the first one. The second one has no dimensions.
    """
    device = like.device
    if device.index is not None and current_device() != device.index:
        with torch.cuda.device(device):
            return random_states(like, dtype, *sizes)
    first, second, before = _allocators(device, dtype, sizes)
    memory = first()
    return memory[before:] if sizes else memory[before], second()


@functools.lru_cache(maxsize=64)
def _allocators(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """Returns functions that allocate both states, and the number of elements before the first one."""
    before = MARK // dtype.itemsize
    shape = (before + (sizes[0] if sizes else 1),)
    first, second = (torch.empty(extents, dtype=dtype, device="meta") for extents in (shape, ()))
    return allocator(first, device), allocator(second, device), before


def is_marked(state: Tensor | None) -> bool:
    """Whether a random state is that of a call that flashtune served."""
    return state is not None and state.data_ptr() % MEMORY_ALIGNMENT == MARK
