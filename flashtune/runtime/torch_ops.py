"""The torch operators `flashtune::attention`, `attention_with_lse` and `attention_features`.

Compilers and dispatch modes see one opaque node of known shapes. Eager calls bypass the operators, which have
as much host overhead as the rest of a call. `attention_features` accepts dense, packed and paged calls. A
program that loads a saved graph with these operators imports this module first.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashtune.core.arguments import checked
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.layouts import Layout
from flashtune.request.feature_request import check_call, read_call
from flashtune.request.options import Call, Options, seeded
from flashtune.request.quantization import given_scales, negated
from flashtune.request.request import Result, read_request, require_tensors, requires_grad
from flashtune.runtime.backward_ops import differentiated
from flashtune.runtime.call_cache import serve
from flashtune.runtime.feature_call_cache import run_call, unsigned
from flashtune.runtime.op_library import CALL_ARGUMENTS, TAGS, call_of, contiguous, library, operands
from flashtune.runtime.torch_modes import refuse_tangents, runs_eagerly

ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, str causal, float? scale, str layout, str prefer, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool deterministic=False)"
)


def call_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
    deterministic: bool = False,
) -> Result:
    """Calls the operator. torch.compile traces through this function into one node."""
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else "none"
    op = torch.ops.flashtune.attention_with_lse if return_lse else torch.ops.flashtune.attention
    result: Result = op(q, k, v, causal, scale, layout, prefer, *scales.scales, deterministic)
    return result


def _register(name: str, returns: str, return_lse: bool) -> None:
    """Registers an operator with its implementation, its fake implementation and its autograd kernel."""

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        served = serve(q, k, v, causal, scale, layout, return_lse, prefer, scales, deterministic)
        return contiguous(served)

    def shapes(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        del scale, deterministic
        request = read_request(q, k, v, causal, layout, return_lse, prefer, scales=scales)
        out = q.new_empty(request.out_shape, dtype=request.out_dtype)
        return (out, q.new_empty(request.lse_shape, dtype=request.lse_dtype)) if return_lse else out

    def differentiate(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        layout: str,
        prefer: str,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Result:
        scales = given_scales(q_scale, k_scale, v_scale)
        refuse_tangents(q, k, v, *scales.scales)
        if requires_grad(q, k, v, scales):
            if scale is not None and scale < 0.0:
                q, scale = negated(q), -scale
            request = read_request(q, k, v, causal, layout, return_lse, prefer, scales, deterministic, True)
            options = Options(causal, layout, layout, return_lse, prefer)
            return contiguous(differentiated(request, Call(q, k, v, scale, options, scales), _forward))
        with torch._C._AutoDispatchBelowAutograd():
            return call_op(q, k, v, causal, scale, layout, return_lse, prefer, scales, deterministic)

    library.define(f"{name}{ARGUMENTS} -> {returns}", tags=TAGS)
    library.impl(name, compute, "CompositeExplicitAutograd")
    library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"flashtune::{name}", shapes, lib=library)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """Returns the output and log-sum-exp by the operator."""
    causal, layout, *_ = call.options
    result = call_op(call.q, call.k, call.v, causal, call.scale, layout, True, call.options.prefer)
    return cast("tuple[Tensor, Tensor]", result)


_register("attention", "Tensor", return_lse=False)
_register("attention_with_lse", "(Tensor, Tensor)", return_lse=True)


NAME = "attention_features"


def attend(call: Call) -> Result:
    """Returns the attention of any call, directly or by the operator if torch must see one.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: The call is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: The call is new, `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    if runs_eagerly(call.q, call.k, call.v):
        return checked(run_call, check_call, seeded(call))
    require_tensors(call.q, call.k, call.v)
    return checked(_by_operator, check_call, seeded(call))


def _by_operator(call: Call) -> Result:
    out, lse = torch.ops.flashtune.attention_features(*operands(call))
    return (out, lse) if call.options.return_lse else out


def _both(result: Result, q: Tensor) -> tuple[Tensor, Tensor]:
    result = contiguous(result)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return (result, q.new_empty(0, dtype=dtype)) if isinstance(result, Tensor) else result


def _compute(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _both(run_call(call_of(q, *rest)), q)  # type: ignore[arg-type]


def _shapes(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = call_of(q, *rest)  # type: ignore[arg-type]
    width = call.options.latent or call.v.shape[-1]
    layout = Layout(call.options.layout)
    out = q.new_empty((*q.shape[:-1], width))
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if not call.options.return_lse:
        return out, q.new_empty(0, dtype=dtype)
    shape = tuple(q.shape[:-1])
    if layout in (Layout.BSHD, Layout.THD):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return out, q.new_empty(shape, dtype=dtype)


def _differentiate(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = call_of(q, *rest)  # type: ignore[arg-type]
    refuse_tangents(call.q, call.k, call.v, *call.side.optional_tensors)
    if requires_grad(call.q, call.k, call.v, call.side):
        call = unsigned(call)
        return _both(differentiated(read_call(call, True), call, _forward_of_features), q)
    with torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, Tensor] = torch.ops.flashtune.attention_features(q, *rest)
        return found


def _forward_of_features(call: Call) -> tuple[Tensor, Tensor]:
    """Returns the output and log-sum-exp by the operator."""
    options = call.options._replace(return_lse=True)
    found: tuple[Tensor, Tensor] = torch.ops.flashtune.attention_features(
        *operands(call._replace(options=options))
    )
    return found


library.define(f"{NAME}({CALL_ARGUMENTS}) -> (Tensor, Tensor)", tags=TAGS)
library.impl(NAME, _compute, "CompositeExplicitAutograd")
library.impl(NAME, _differentiate, "Autograd")
torch.library.register_fake(f"flashtune::{NAME}", _shapes, lib=library)
