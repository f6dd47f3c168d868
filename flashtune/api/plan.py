"""`plan` and the plans of plain calls: calls prepared in advance, for serving loops and CUDA graphs."""

from __future__ import annotations

from typing import Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec
from torch import Tensor

from flashtune.api.attention import dense_call
from flashtune.api.feature_plans import DensePlan, plan_words
from flashtune.core.arguments import checked, read_scale
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS
from flashtune.request.options import CausalOption, DenseOptions, LayoutOption, PreferOption, is_plain
from flashtune.request.quantization import given_scales, negated
from flashtune.request.request import Executor, Request, Result, read_request, require_tensors, requires_grad
from flashtune.runtime.autograd import go_back, leaves_like
from flashtune.runtime.call_cache import call_key, executor_of

Planned_co = TypeVar("Planned_co", bound=Result, covariant=True)


class SideTensors(TypedDict, total=False):
    """Tensors that a plan accepts in addition to q, k, v and scales."""

    alibi_slopes: Tensor | None
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    sinks: Tensor | None
    prefix_lengths: Tensor | None
    kv_lengths: Tensor | None


class Plan(Protocol[Planned_co]):
    """A prepared call of `attention`. It has little host overhead and can be captured in a CUDA graph."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        attn_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        kv_lengths: Tensor | None = None,
    ) -> Planned_co:
        """Returns the output, and the log-sum-exp if it was planned, as `attention`.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        ...


class PlainPlan(Generic[Planned_co]):
    """The plan that `plan` returns for calls without masks, lengths or a quantized cache."""

    __slots__ = ("_deterministic", "_executor", "_key", "_negated", "_options", "_scale", "_words")

    def __init__(
        self,
        executor: Executor,
        key: tuple[object, ...],
        options: tuple[CausalOption, LayoutOption, bool, PreferOption],
        scale: float | None,
        request: Request,
        deterministic: bool = False,
    ) -> None:
        self._executor = executor
        self._words = plan_words(request, scale)
        self._key = key
        self._options = options
        self._deterministic = deterministic
        self._negated = scale is not None and scale < 0
        self._scale = -scale if scale is not None and scale < 0 else scale

    def __repr__(self) -> str:
        """Returns the planned shape, in the syntax of `--shape`, and the options."""
        return f"flashtune.plan({self._words})"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **side: Unpack[SideTensors],
    ) -> Planned_co:
        """As `Plan`, but raises ProblemError if side tensors are given."""
        scales = given_scales(q_scale, k_scale, v_scale)
        given = any(value is not None for value in side.values()) if side else False
        key = checked(call_key, read_request, q, k, v, *self._options, scales, self._deterministic)
        if given or key != self._key:
            raise ProblemError(
                "these tensors differ from the planned ones in shape, strides, alignment, dtype, device, "
                "grad or which are given: call flashtune.plan(...) with these tensors"
            )
        query = negated(q) if self._negated else q
        if scales is NO_EXTRA_INPUTS:
            return cast("Planned_co", self._executor(query, k, v, self._scale))
        return cast("Planned_co", self._executor(query, k, v, self._scale, scales))


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

    Args:
        q: Queries with the shape, strides, dtype and device of later calls; values are ignored. The same
            holds for k and v. The other arguments are those of `attention`.
        k: Keys.
        v: Values.
        return_lse: Whether the plan returns the log-sum-exp too.
        **options: Options of `attention`. Tensors are examples, as q is. Numbers become part of the plan.

    Returns:
        A callable with the parameters (q, k, v). Tensors that were passed as options are passed by name.

    Raises:
        ProblemError: As `attention`.
        KernelError: As `attention`. Plan before a CUDA graph is captured, not during the capture.
        VerificationError: As `attention`.
    """
    require_tensors(q, k, v)
    call = dense_call(q, k, v, return_lse=return_lse, **options)
    if is_plain(call):
        return _plain_plan(q, k, v, return_lse, options)
    planned: DensePlan[Result] = DensePlan(call)
    return planned


def _plain_plan(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, call_options: DenseOptions
) -> Plan[Result]:
    scale = read_scale(call_options.get("scale"))
    scales = given_scales(
        call_options.get("q_scale"), call_options.get("k_scale"), call_options.get("v_scale")
    )
    options = (
        call_options.get("causal", False),
        call_options.get("layout", "bhsd"),
        return_lse,
        call_options.get("prefer", "fastest"),
    )
    deterministic = call_options.get("deterministic", False)
    # Check the call before its key is computed.
    request = read_request(q, k, v, *options, scales=scales, deterministic=deterministic)
    request = msgspec.structs.replace(request, needs_grad=requires_grad(q, k, v, scales))
    key = call_key(q, k, v, *options, scales, deterministic)
    # Negated queries can have other strides than those of the call: gaps of a view are not preserved.
    query = negated(q) if scale is not None and scale < 0 else q
    executor_key = call_key(query, k, v, *options, scales, deterministic)
    executor = executor_of(executor_key, query, k, v, *options, scales, deterministic)
    planned: PlainPlan[Result] = PlainPlan(executor, key, options, scale, request, deterministic)
    # Libraries and allocators create state in the first run, which is not possible during a capture.
    fresh = leaves_like(q, k, v)
    result = planned(*fresh, q_scale=scales.q_scale, k_scale=scales.k_scale, v_scale=scales.v_scale)
    go_back(result, fresh)
    return planned
