"""`plan`: everything about a call resolved ahead of it, for serving loops and CUDA graphs."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar, cast, overload

from torch import Tensor

from flashtune.api import CausalOption, LayoutOption, PreferOption
from flashtune.calls import call_key, server_of
from flashtune.errors import ProblemError
from flashtune.quantization import given_scales, negated
from flashtune.request import require_tensors
from flashtune.serving import Result, Serve
from flashtune.side import NO_SIDE

Planned_co = TypeVar("Planned_co", bound=Result, covariant=True)


class Plan(Generic[Planned_co]):
    """Attention of tensors like those it was planned for; cheap, and safe to capture in a CUDA graph."""

    __slots__ = ("_key", "_negated", "_options", "_scale", "_serve")

    def __init__(
        self,
        serve: Serve,
        key: tuple[object, ...],
        options: tuple[CausalOption, LayoutOption, bool, PreferOption],
        scale: float | None,
    ) -> None:
        self._serve = serve
        self._key = key
        self._options = options
        self._negated = scale is not None and scale < 0
        self._scale = -scale if scale is not None and scale < 0 else scale

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Planned_co:
        """The output, and the log-sum-exp where the plan returns one; as `attention`.

        Raises:
            ProblemError: The tensors differ from the planned ones in more than their values.
        """
        scales = given_scales(q_scale, k_scale, v_scale)
        if call_key(q, k, v, *self._options, scales) != self._key:
            raise ProblemError(
                "these tensors differ from the planned ones in shape, strides, alignment, dtype, device, "
                "grad or which scales are given: call flashtune.plan(...) with them"
            )
        served = negated(q) if self._negated else q
        if scales is NO_SIDE:
            return cast("Planned_co", self._serve(served, k, v, self._scale))
        return cast("Planned_co", self._serve(served, k, v, self._scale, scales))


@overload
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: Literal[False] = ...,
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> Plan[Tensor]: ...
@overload
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: Literal[True],
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> Plan[tuple[Tensor, Tensor]]: ...
@overload
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: bool,
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> Plan[Result]: ...
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = False,
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
    return_lse: bool = False,
    prefer: PreferOption = "fastest",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Plan[Result]:
    """Resolves a call once: selects, compiles, loads, checks where needed, and runs it once.

    Args:
        q: A tensor like those to come: shape, strides, dtype and device count, values do not. So
            do k and v; the other arguments are those of `attention`.
        k: Keys.
        v: Values.
        causal: The causal mask and its alignment.
        scale: Factor of the scores.
        layout: The order of the dimensions.
        return_lse: Whether the plan returns the log-sum-exp too.
        prefer: Whether SDPA may serve where it was measured as faster.
        q_scale: Side like those to come; their values do not count.
        k_scale: Likewise.
        v_scale: Likewise.

    Returns:
        A callable of (q, k, v), and of the same scales by name.

    Raises:
        ProblemError: As `attention`.
        KernelError: As `attention`; plan before a capture, not in it.
        VerificationError: As `attention`.
    """
    require_tensors(q, k, v)
    options = (causal, layout, return_lse, prefer)
    scales = given_scales(q_scale, k_scale, v_scale)
    key = call_key(q, k, v, *options, scales)
    # Negated queries may lie otherwise than those of the call: a view's gaps are not kept.
    served = negated(q) if scale is not None and scale < 0 else q
    server = server_of(call_key(served, k, v, *options, scales), served, k, v, *options, scales)
    planned: Plan[Result] = Plan(server, key, options, scale)
    # Libraries and allocators make what they keep in a first run, which a capture could not hold.
    planned(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return planned
