"""The torch operator `flashtune::attention_backward`, and the autograd kernels of operators.

The graph of a compiled call contains a forward operator, which also returns the log-sum-exp, and this
operator. Tracing selects the backend as far as shapes determine it. A baseline is traced operator by
operator, as if the program called it directly. Kernels are selected when the operators run.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES, ExtraInputs
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import DIFFERENTIABLE_SIDE, choose
from flashtune.recording.recorder import counted
from flashtune.request.call import Call
from flashtune.request.gradients import BackwardExecutor, BackwardInputs, Gradients
from flashtune.request.request import Request, Result
from flashtune.runtime.autograd import Pair, differentiable, only_once, with_side
from flashtune.runtime.backward_executors import with_rows
from flashtune.runtime.call_key import call_key, unsigned
from flashtune.runtime.op_library import TAGS, call_of, library, operands, schema
from flashtune.runtime.prepare import baseline_of, prepare_alone
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import transforms

NAME = "attention_backward"
# The number of operands before those of the call.
GIVEN = 4
# Gradients of q, k, v, sinks, bias and slopes, and those of captured tensors one after the other.
RESULTS = 7
ARGUMENTS = f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {schema()})"

# Assumed value of lengths that are unknown at compile time.
UNKNOWN_LENGTH = 2048

Forward = Callable[[Call], Result]


def differentiated(request: Request, call: Call, forward: Forward) -> Result:
    """Returns the result of a differentiable call of an operator. It may be traced.

    The request is that of the call, with gradients. The call's scale is not negative. `forward` returns the
    result of such a call by an operator.
    """
    bound = TracedRequest(_hinted(request), call.q, call.k, call.v, call.side, SESSION.platform)
    bound.check_supported()
    _, decision = choose(bound)
    if not decision.generated:
        return baseline_of(decision, request)(call.q, call.k, call.v, call.scale, call.side)
    options = call.options._replace(return_lse=request.return_lse, deterministic=request.deterministic)
    call = call._replace(options=options)
    pair = Pair(
        functools.partial(_forward_below, forward, call),
        functools.partial(_backward_operator, call),
        request.return_lse,
        is_traced=True,
    )
    with enable_single_level_autograd_function():
        return differentiable(pair)(call.q, call.k, call.v, call.scale, call.side)


class TracedRequest(BoundRequest):
    """A request with tensors that may have no memory yet. Kernels may assume the most of them."""

    forward_properties = Specialization(lse=True)
    copied = (False, False, False)

    @property
    def backward_properties(self) -> Specialization:
        """The best properties."""
        return Specialization(lse=self.request.return_lse)

    @property
    def sdpa_backend(self) -> str | None:
        """The backend that SDPA selects, or None if a compiler does not know it yet."""
        sizes = (size for tensor in self.tensors[:2] for size in tensor.shape)
        is_symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
        # Whether SDPA computes a mask correctly is tried in eager calls alone.
        if self.request.problem.features or is_symbolic or transforms() is not None:
            return None
        return super().sdpa_backend


def _hinted(request: Request) -> Request:
    """Returns a request with numbers as lengths. A compiler's symbols are replaced by its hints."""
    sizes = {name: getattr(request.problem, name) for name in Problem.__struct_fields__}
    symbols = {name: size for name, size in sizes.items() if isinstance(size, torch.SymInt)}
    if not symbols and not isinstance(request.tokens, torch.SymInt):
        return request
    extents = {name: _hint(size) for name, size in symbols.items()}
    problem = msgspec.structs.replace(request.problem, **extents)
    return msgspec.structs.replace(request, problem=problem, tokens=_hint(request.tokens))


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        # Lengths that depend on data have no hint.
        return int(size.node.hint) if size.node.has_hint() else UNKNOWN_LENGTH
    return size


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Skips autograd's kernels in operators. With nested transforms, the next level's autograd runs."""
    grad = contextlib.nullcontext() if transforms() is None else torch.enable_grad()
    with grad, torch._C._AutoDispatchBelowAutograd():
        yield


def _forward_below(
    forward: Forward,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> tuple[Tensor, Tensor]:
    options = call.options._replace(return_lse=True)
    with _below_autograd():
        out, lse = forward(call._replace(q=q, k=k, v=v, scale=scale, options=options, side=side))
    return out, lse


def _backward_operator(call: Call, inputs: BackwardInputs) -> Gradients:
    q, k, v, out, lse, dout, dlse, scale, side = inputs
    call = call._replace(q=q, k=k, v=v, scale=scale, side=side)
    gradients = torch.ops.flashtune.attention_backward(dout, dlse, out, lse, *operands(call))
    bias = None if side.bias is None or side.bias.dtype is torch.bool else side.bias
    extra = zip((side.sinks, bias, side.slopes), gradients[3:6], strict=True)
    tables = _tables(side)
    parts = gradients[6].split([table.numel() for table in tables.values()]) if tables else ()
    return Gradients(
        *gradients[:3],
        *(None if side_input is None else gradient for side_input, gradient in extra),
        **{
            f"d{name}": part.view(table.shape).to(table.dtype)
            for (name, table), part in zip(tables.items(), parts, strict=True)
        },
    )


def _tables(side: ExtraInputs) -> dict[str, Tensor]:
    """Returns the captured tensors that may have a gradient, by name."""
    tables = {name: getattr(side, name) for name in TABLES}
    return {name: table for name, table in tables.items() if table is not None and table.is_floating_point()}


def _compute(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *values: Any) -> tuple[Tensor, ...]:
    call = call_of(values)
    # Compilers save the operands too, and hooks of saved tensors may return other strides.
    call = call._replace(q=with_rows(call.q), k=with_rows(call.k), v=with_rows(call.v))
    out, lse = with_rows(out), lse.contiguous()

    def make(bound: BoundRequest) -> BackwardExecutor:
        # The tensors of an operator do not show which extra inputs require grad.
        trained = tuple(TABLES.index(name) for name in _tables(bound.side))
        request = msgspec.structs.replace(bound.request, constant_bias=False, trained_tables=trained)
        bound = bound.replaced(request)
        served = prepare_alone(bound, SESSION.loader)
        if not (request.is_empty or request.is_double):
            served = counted(served, SESSION.recordings, request.backward, bound.backward_properties)
        return with_side(served, request.layout, DIFFERENTIABLE_SIDE)

    # `keys_of_any_address` counts positions from the start.
    key = *call_key(call), NAME, call.options.deterministic
    executor = SESSION.prepared(key, call, make, needs_grad=True)
    served = unsigned(call)
    gradients = executor(BackwardInputs(*served[:3], out, lse, dout, dlse, served.scale, served.side))
    if served.q is not call.q:
        gradients = gradients._replace(dq=-gradients.dq)
    own = tuple(lse.new_empty(0) if gradient is None else gradient for gradient in gradients[:6])
    tables = [
        (torch.zeros_like(table) if gradient is None else gradient).to(lse.dtype).flatten()
        for name, table in _tables(call.side).items()
        for gradient in (getattr(gradients, f"d{name}"),)
    ]
    return *own, torch.cat(tables) if tables else lse.new_empty(0)


def _shapes(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *values: Any) -> tuple[Tensor, ...]:
    del dout, dlse, out
    call = call_of(values)
    side = call.side
    bias = None if side.bias is None or side.bias.dtype is torch.bool else side.bias
    extra = (
        lse.new_empty(0 if side_input is None else side_input.shape)
        for side_input in (side.sinks, side.slopes)
    )
    dsinks, dslopes = extra
    dbias = lse.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return (
        torch.empty_like(call.q),
        torch.empty_like(call.k),
        torch.empty_like(call.v),
        dsinks,
        dbias,
        dslopes,
        lse.new_empty(sum(table.numel() for table in _tables(side).values())),
    )


def _differentiate(*arguments: object) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in arguments
    ):
        with enable_single_level_autograd_function():
            return only_once(_redispatched, *arguments)
    return _redispatched(*arguments)


def _redispatched(*arguments: object) -> tuple[Tensor, ...]:
    with _below_autograd():
        results: tuple[Tensor, ...] = torch.ops.flashtune.attention_backward(*arguments)
        return results


library.define(f"{NAME}{ARGUMENTS} -> ({', '.join(['Tensor'] * RESULTS)})", tags=TAGS)
library.impl(NAME, _compute, "CompositeExplicitAutograd")
library.impl(NAME, _differentiate, "Autograd")
torch.library.register_fake(f"flashtune::{NAME}", _shapes, lib=library)
