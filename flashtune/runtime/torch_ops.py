"""The torch operators `flashtune::attention`, `attention_with_lse` and `attention_features`.

Compilers and dispatch modes see one opaque node of known shapes. Eager calls bypass the operators, which have
as much host overhead as the rest of a call. `attention_features` accepts dense, packed and paged calls. The
other two have few operands, which costs less. A program that loads a saved graph with these operators imports
this module first.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.arguments import checked
from flashtune.core.layouts import Layout
from flashtune.request.call import Call, autocasted, requires_grad, seeded
from flashtune.request.flop_count import backward_flops, forward_flops
from flashtune.request.read_call import read_call, require_tensors
from flashtune.request.request import Result
from flashtune.runtime.backward_ops import GIVEN, differentiated
from flashtune.runtime.call_cache import known_executor, run_call
from flashtune.runtime.call_key import unsigned
from flashtune.runtime.op_library import ALL, TAGS, call_of, contiguous, library, operands, schema
from flashtune.runtime.torch_modes import (
    count_flops,
    dispatch_modes,
    is_compiling,
    is_tracing,
    refuse_tangents,
    runs_eagerly,
)

# Operands of calls without features. Those after the required ones have defaults.
PLAIN = (
    "q",
    "k",
    "v",
    "causal",
    "scale",
    "layout",
    "prefer",
    "q_scale",
    "k_scale",
    "v_scale",
    "deterministic",
)
REQUIRED = PLAIN.index("q_scale")
AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


class Operator(NamedTuple):
    """One operator."""

    name: str  # Its name in the library.
    names: tuple[str, ...]  # The names of its operands.
    returns: str  # The types of its results.
    options: dict[str, object]  # Options that are not operands.

    @property
    def schema(self) -> str:
        """The operator as torch's libraries declare it."""
        own = schema() if self.names is ALL else schema(self.names, len(PLAIN) - REQUIRED)
        return f"{self.name}({own}) -> {self.returns}"

    def call(self, values: tuple[Any, ...]) -> Call:
        """Returns the call of its operands."""
        return call_of(values, self.names, **self.options)

    def results(self, result: Result, q: Tensor) -> Result:
        """Returns its results. An operator with all operands always returns a log-sum-exp."""
        result = contiguous(result)
        if self.names is ALL and isinstance(result, Tensor):
            return result, q.new_empty(0, dtype=_lse_dtype(q))
        return result


OPERATORS = (
    Operator("attention", PLAIN, "Tensor", {"return_lse": False}),
    Operator("attention_with_lse", PLAIN, "(Tensor, Tensor)", {"return_lse": True}),
    Operator("attention_features", ALL, "(Tensor, Tensor)", {}),
)


def attend(call: Call) -> Result:
    """Returns the attention of any call, directly or by the operator if torch must see one."""
    if runs_eagerly(call.q, call.k, call.v) and not is_tracing():
        return checked(run_call, read_call, seeded(call))
    require_tensors(call)
    if not is_compiling():
        # A counter that is older than this module has no formulas yet.
        count_flops(FLOPS)
    return checked(call_operator, read_call, seeded(call))


def call_plain_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    prefer: str,
    deterministic: bool,
) -> Result:
    """Calls the operator of a call without features, which checks the arguments.

    torch.compile guards on each object that it traces, in each later call. So this function uses few.
    """
    if causal is True or causal is False:
        causal = "bottom_right" if causal else "none"
    ops = torch.ops.flashtune
    op = ops.attention_with_lse.default if return_lse else ops.attention.default
    more = (None, None, None, True) if deterministic else ()
    result: Result = op(q, k, v, causal, scale, layout, prefer, *more)
    return result


def call_operator(call: Call) -> Result:
    """Calls the operator of a call. torch.compile traces through this function into one node."""
    if call.is_plain:
        ops = torch.ops.flashtune
        op = ops.attention_with_lse if call.options.return_lse else ops.attention
        result: Result = op.default(*operands(call, PLAIN))
        return result
    out, lse = torch.ops.flashtune.attention_features(*operands(call))
    return (out, lse) if call.options.return_lse else out


def _register(operator: Operator) -> None:
    """Registers an operator with its implementation, its fake implementation and its autograd kernel."""

    def known(values: tuple[Any, ...]) -> Result | None:
        # Defaults at the end are not passed.
        if operator.names is ALL or len(values) != REQUIRED:
            return None
        q, k, v, causal, scale, layout, prefer = values
        return_lse = operator.options["return_lse"]
        executor = known_executor(q, k, v, causal, scale, layout, return_lse, prefer, False)
        return None if executor is None else contiguous(executor(q, k, v, scale))

    def compute(*values: Any) -> Result:
        result = known(values)
        return operator.results(run_call(operator.call(values)), values[0]) if result is None else result

    def shapes(*values: Any) -> Result:
        call = operator.call(values)
        if call.is_plain:
            read_call(call)
        return operator.results(_fake(call), call.q)

    def differentiate(*values: Any) -> Result:
        if dispatch_modes():
            # A counter of a compiled program.
            count_flops(FLOPS)
        if not (torch.is_grad_enabled() and _any_requires_grad(values)):
            # Another pass through the dispatcher would cost as much as the rest of the call.
            result = known(values)
            if result is not None:
                return result
            if runs_eagerly(*values[:3]):
                return compute(*values)
        call = operator.call(values)
        refuse_tangents(call.q, call.k, call.v, *call.side.optional_tensors)
        if requires_grad(call):
            call = unsigned(call)
            return operator.results(differentiated(read_call(call, True), call, call_operator), call.q)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.results(call_operator(call), call.q)

    def cast(keyset: Any, *values: Any) -> Result:
        del keyset
        call = autocasted(operator.call(values))
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            result: Result = op(*operands(call, operator.names))
            return result

    library.define(operator.schema, tags=TAGS)
    op = getattr(torch.ops.flashtune, operator.name).default
    for key in AUTOCAST_KEYS:
        library.impl(operator.name, cast, key, with_keyset=True)
    library.impl(operator.name, compute, "CompositeExplicitAutograd")
    library.impl(operator.name, differentiate, "Autograd")
    torch.library.register_fake(f"flashtune::{operator.name}", shapes, lib=library)


def _any_requires_grad(values: tuple[Any, ...]) -> bool:
    return True in [value.requires_grad for value in values if isinstance(value, Tensor)]


def _fake(call: Call) -> Result:
    """Returns tensors of the shapes and types of a call's result."""
    q, options = call.q, call.options
    dtype = torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype
    out = q.new_empty((*q.shape[:-1], options.latent or call.v.shape[-1]), dtype=dtype)
    if not options.return_lse:
        return out
    shape = tuple(q.shape[:-1])
    if options.layout in (Layout.BSHD, Layout.THD):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return out, q.new_empty(shape, dtype=_lse_dtype(q))


def _flops(operator: Operator, *values: Any, out_val: object = None) -> int:
    del out_val
    return forward_flops(operator.call(values))


def _backward_flops(*values: Any, out_val: object = None) -> int:
    del out_val
    return backward_flops(call_of(values[GIVEN:]))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


for operator in OPERATORS:
    _register(operator)
FLOPS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.flashtune, op.name): functools.partial(_flops, op) for op in OPERATORS
}
FLOPS[torch.ops.flashtune.attention_backward] = _backward_flops
count_flops(FLOPS)
