"""`plan` and its sisters: everything about a call resolved ahead of it, for serving loops and CUDA graphs."""

from __future__ import annotations

from typing import Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec
from torch import Tensor

from flashtune.api.attention import dense_call
from flashtune.api.feature_plans import DensePlan, plan_words
from flashtune.core.arguments import checked, read_scale
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import NO_SIDE
from flashtune.request.options import (
    CausalOption,
    DenseOptions,
    LayoutOption,
    PreferOption,
    is_plain,
)
from flashtune.request.quantization import given_scales, negated
from flashtune.request.request import Request, Result, Serve, read_request, require_tensors, requires_grad
from flashtune.runtime.autograd import go_back, leaves_like
from flashtune.runtime.call_cache import call_key, server_of

Planned_co = TypeVar("Planned_co", bound=Result, covariant=True)


class SideTensors(TypedDict, total=False):
    """Tensors that a plan takes beside q, k, v and scales."""

    alibi_slopes: Tensor | None
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    sinks: Tensor | None
    prefix_lengths: Tensor | None
    kv_lengths: Tensor | None


class Plan(Protocol[Planned_co]):
    """Attention of tensors like those it was planned for; cheap, and safe to capture in a CUDA graph."""

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
        """The output, and the log-sum-exp where the plan returns one; as `attention`.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        ...


class PlainPlan(Generic[Planned_co]):
    """What `plan` gives for a call without masks, lengths or a quantised cache."""

    __slots__ = ("_deterministic", "_key", "_negated", "_options", "_scale", "_serve", "_words")

    def __init__(
        self,
        serve: Serve,
        key: tuple[object, ...],
        options: tuple[CausalOption, LayoutOption, bool, PreferOption],
        scale: float | None,
        request: Request,
        deterministic: bool = False,
    ) -> None:
        self._serve = serve
        self._words = plan_words(request, scale)
        self._key = key
        self._options = options
        self._deterministic = deterministic
        self._negated = scale is not None and scale < 0
        self._scale = -scale if scale is not None and scale < 0 else scale

    def __repr__(self) -> str:
        """Returns the planned shape, as `--shape` takes it, and the options."""
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
        """As `Plan`; of tensors beside these there are none."""
        scales = given_scales(q_scale, k_scale, v_scale)
        given = any(value is not None for value in side.values()) if side else False
        key = checked(call_key, read_request, q, k, v, *self._options, scales, self._deterministic)
        if given or key != self._key:
            raise ProblemError(
                "these tensors differ from the planned ones in shape, strides, alignment, dtype, device, "
                "grad or which are given: call flashtune.plan(...) with them"
            )
        served = negated(q) if self._negated else q
        if scales is NO_SIDE:
            return cast("Planned_co", self._serve(served, k, v, self._scale))
        return cast("Planned_co", self._serve(served, k, v, self._scale, scales))


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
    """Resolves a call once: selects, compiles, loads, checks where needed, and runs it once.

    Args:
        q: A tensor like those to come: shape, strides, dtype and device count, values do not. So
            do k and v; the other arguments are those of `attention`.
        k: Keys.
        v: Values.
        return_lse: Whether the plan returns the log-sum-exp too.
        **options: Those of `attention`. Tensors among them are like those to come; numbers are kept.

    Returns:
        A callable of (q, k, v), and of the same tensors among the options by name.

    Raises:
        ProblemError: As `attention`.
        KernelError: As `attention`; plan before a capture, not in it.
        VerificationError: As `attention`.
    """
    require_tensors(q, k, v)
    call = dense_call(q, k, v, return_lse=return_lse, **options)
    if is_plain(call):
        return _plain_plan(q, k, v, return_lse, options)
    planned: DensePlan[Result] = DensePlan(call)
    return planned


def _plain_plan(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, asked: DenseOptions) -> Plan[Result]:
    scale = read_scale(asked.get("scale"))
    scales = given_scales(asked.get("q_scale"), asked.get("k_scale"), asked.get("v_scale"))
    options = (
        asked.get("causal", False),
        asked.get("layout", "bhsd"),
        return_lse,
        asked.get("prefer", "fastest"),
    )
    deterministic = asked.get("deterministic", False)
    # Nothing but a valid call has a key.
    request = read_request(q, k, v, *options, scales=scales, deterministic=deterministic)
    request = msgspec.structs.replace(request, needs_grad=requires_grad(q, k, v, scales))
    key = call_key(q, k, v, *options, scales, deterministic)
    # Negated queries may lie otherwise than those of the call: a view's gaps are not kept.
    served = negated(q) if scale is not None and scale < 0 else q
    served_key = call_key(served, k, v, *options, scales, deterministic)
    server = server_of(served_key, served, k, v, *options, scales, deterministic)
    planned: PlainPlan[Result] = PlainPlan(server, key, options, scale, request, deterministic)
    # Libraries and allocators make what they keep in a first run, which a capture could not hold.
    fresh = leaves_like(q, k, v)
    result = planned(*fresh, q_scale=scales.q_scale, k_scale=scales.k_scale, v_scale=scales.v_scale)
    go_back(result, fresh)
    return planned
