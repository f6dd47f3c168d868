"""`plan` and the plans of all calls: calls prepared in advance, for serving loops and CUDA graphs."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

from torch import Tensor

from flashtune.api.merge_states import attend_shared, shared_calls
from flashtune.core.arguments import checked
from flashtune.core.block_mask import BlockMask
from flashtune.core.canonical import shape_text
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.request.autocast import any_autocast
from flashtune.request.call import Call, DenseOptions, autocasted, dense_call, seeded
from flashtune.request.read_call import read_call
from flashtune.request.request import Executor, Request, Result
from flashtune.runtime.autograd import go_back, leaves_like
from flashtune.runtime.call_key import call_key, unsigned
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import dispatch_modes, is_tracing
from flashtune.runtime.torch_ops import attend

Planned_co = TypeVar("Planned_co", bound=Result, covariant=True)


class Prepared:
    """The executor of one kind of call, or those of both parts of a call with a shared prefix."""

    __slots__ = ("_executor", "_key", "_parts")

    def __init__(self, call: Call) -> None:
        """Selects, compiles and loads kernels, and checks them if necessary.

        Raises:
            ProblemError: The call is invalid, or no backend supports it.
            KernelError: A CUDA graph is being captured, or `prefer` is "generated" and no kernel loads.
            VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
        """
        # Check the call before its key is computed.
        read_call(call)
        self._key = call_key(call)
        self._parts: list[Prepared] = []
        self._executor: Executor | None = None
        if call.shared_prefix:
            self._parts = [Prepared(part) for part in shared_calls(call)]
        else:
            # Negated queries can have other strides than those of the call: gaps of a view are not preserved.
            self._executor = SESSION.executor(unsigned(call))

    def run(self, call: Call) -> Result:
        """Returns the attention of a call of this kind.

        Raises:
            ProblemError: The call is of another kind.
        """
        if checked(call_key, read_call, call) != self._key:
            raise ProblemError(
                "these tensors differ from the planned ones in shape, strides, alignment, dtype, device, "
                "grad or which are given, or torch's setting of tf32 or determinism changed: plan again with "
                "tensors like these"
            )
        if is_tracing() or dispatch_modes():
            return attend(call)
        if self._executor is None:
            return attend_shared(call, [part.run for part in self._parts])
        call = unsigned(seeded(call))
        return self._executor(call.q, call.k, call.v, call.scale, call.side)


class Plan(Generic[Planned_co]):
    """A prepared call. It has little host overhead and can be captured in a CUDA graph."""

    __slots__ = ("_make", "_others", "_prepared", "_text")

    def __init__(self, make: Callable[..., Call], call: Call, prepared: Prepared, text: str) -> None:
        """Binds a prepared call. `make` returns the call of new tensors, and `text` is the plan's `repr`."""
        self._make = make
        # Such a call has no tensors but q, k and v, so a later one need not be made from arguments.
        self._others = call[3:] if call.side is NO_EXTRA_INPUTS else None
        self._prepared = prepared
        self._text = text

    def __repr__(self) -> str:
        """Returns the planned shape, in the syntax of `--shape`, and the options."""
        return self._text

    def __call__(self, *tensors: Tensor | None, **named: Tensor | BlockMask | None) -> Planned_co:
        """Returns the output, and the log-sum-exp if it was planned.

        Args:
            *tensors: The planned function's parameters that are tensors.
            **named: Tensors and block masks that were passed as options to the planned function.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        if self._others is not None and len(tensors) == 3 and not named:
            call = Call(*tensors, *self._others)  # type: ignore[arg-type]
            if any_autocast():
                call = autocasted(call)
        else:
            call = self._make(*tensors, **named)
        return cast("Planned_co", self._prepared.run(call))


@overload
def plan(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[DenseOptions]
) -> Plan[Tensor]: ...
@overload
def plan(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[DenseOptions]
) -> Plan[tuple[Tensor, Tensor]]: ...
@overload
def plan(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[DenseOptions]
) -> Plan[Result]: ...
def plan(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[DenseOptions]
) -> Plan[Result]:
    """Prepares a call: selects, compiles and loads a kernel, checks it if necessary, and runs it once.

    A plan keeps its `batch_invariant`, also if `flashtune.set_batch_invariant` is called later.

    Args:
        q: Queries with the shape, strides, dtype and device of later calls; values are ignored. The same
            holds for k and v. The other arguments are those of `attention`.
        k: Keys.
        v: Values.
        return_lse: Whether the plan returns the log-sum-exp too.
        **options: Options of `attention`. Tensors are examples, as q is. Numbers become part of the plan.

    Returns:
        A callable with the parameters (q, k, v). Tensors and block masks of the options are passed by name.

    Raises:
        ProblemError: As `attention`.
        KernelError: As `attention`. Plan before a CUDA graph is captured, not during the capture.
        VerificationError: As `attention`.
    """
    return planned("plan", dense_call, (q, k, v), options, return_lse=return_lse)


def planned(
    name: str,
    make: Callable[..., Call],
    tensors: tuple[Tensor | None, ...],
    options: Mapping[str, object],
    shared_prefix: int = 0,
    **numbers: object,
) -> Plan[Any]:
    """Returns a plan, after it was run once.

    Args:
        name: The name of the function that makes the plan.
        make: Returns a call.
        tensors: Arguments of `make` that later calls pass too.
        options: Keyword arguments of `make`. Later calls pass those that are tensors or block masks.
        shared_prefix: Number of first tokens that all sequences share.
        **numbers: Other keyword arguments of `make`.
    """
    kept = {key: value for key, value in options.items() if not isinstance(value, (Tensor, BlockMask))}
    make = functools.partial(make, **kept, **numbers)
    if shared_prefix:
        make = functools.partial(_shared, make, shared_prefix)
    call = make(*tensors, **{key: options[key] for key in options.keys() - kept.keys()})
    make = functools.partial(make, batch_invariant=call.options.batch_invariant)
    request = read_call(call)
    words = f", shared_prefix={shared_prefix}" if shared_prefix else ""
    prepared = Prepared(call)
    # Libraries and allocators create state in the first run, which is not possible during a capture.
    q, k, v = leaves_like(call.q, call.k, call.v)
    go_back(prepared.run(call._replace(q=q, k=k, v=v)), (q, k, v))
    return Plan(make, call, prepared, f"flashtune.{name}({_words(request, call.scale)}{words})")


def _shared(
    make: Callable[..., Call], tokens: int, *tensors: Tensor, **named: Tensor | BlockMask | None
) -> Call:
    return make(*tensors, **named)._replace(shared_prefix=tokens)


def _words(request: Request, scale: float | None) -> str:
    """Returns the planned shape and the options that are not in the shape, as text."""
    words = [
        repr(shape_text(request.problem)),
        f"layout={request.layout.value!r}",
        f"device={str(request.device)!r}",
        f"prefer={request.prefer.value!r}",
        f"scale={scale!r}" if scale is not None else "",
        "return_lse=True" if request.return_lse else "",
        "with gradients" if request.needs_grad else "",
    ]
    return ", ".join(filter(None, words))
