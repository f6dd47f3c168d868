"""Servers: what computes one kind of call, prepared once and then called for every call alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from flashtune.binaries import binary_of
from flashtune.decision import Decision, Server, baseline, decide, needed_specialization, output_like
from flashtune.delegation import sdpa_attention
from flashtune.dispatch import default_selection, default_selections, of_nearest, proven_by
from flashtune.errors import KernelError, VerificationError
from flashtune.launch import Launch, bind
from flashtune.nearest import is_far
from flashtune.notices import search_command, tell_once
from flashtune.problem import Dtype
from flashtune.quantization import check_scales, given_scales
from flashtune.rendered import kernel_of
from flashtune.request import Prefer, Request
from flashtune.self_check import passes_self_check
from flashtune.side import NO_SIDE, Side
from flashtune.standard import standard_attention
from flashtune.target import Target

if TYPE_CHECKING:
    from flashtune.record import Selection

Result = Tensor | tuple[Tensor, Tensor]
# (q, k, v, scale) of the call's layout; the scale is not negative, and None asks for the default. What
# serves quantised inputs takes their scales as well.
Serve = Callable[..., Result]


def prepare(request: Request, q: Tensor, k: Tensor, v: Tensor) -> Serve:
    """What serves a request from now on: compiled, loaded and proven.

    Raises:
        ProblemError: Nobody can serve it.
        KernelError: Only generated kernels may serve, and none compiles or loads.
        VerificationError: Only generated kernels may serve, and they are wrong on this GPU.
    """
    decision = decide(request, q, k, v)
    if decision.server is Server.GENERATED:
        return _generated_or_baseline(decision, request, q, k, v)
    if decision.server is Server.INTERPRETER:
        return functools.partial(_interpreted, decision, request)
    if decision.server is Server.NOBODY:
        return functools.partial(_empty, request)
    if request.needs_grad:
        tell_once(
            "gradients",
            "an input requires grad and flashtune generates no backward pass yet: "
            f"{_in_words(decision.server)} serves",
        )
    return _baseline(decision.server, request)


def _generated_or_baseline(decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor) -> Serve:
    assert decision.selection is not None
    assert decision.target is not None
    failure: KernelError | VerificationError
    try:
        serve = _generated(decision.selection, decision.target, request, q, k, v)
    except (KernelError, VerificationError) as error:
        failure = error
    else:
        _tell_of_fallback(decision.selection, request)
        return serve
    # A server that meets ever new lengths would be told of the same kernel at each of them.
    matter, advice = "failed", f"run {search_command(request.problem)}"
    for other, name in _instead(decision.selection, decision.target, request, q, k, v):
        try:
            serve = _generated(other, decision.target, request, q, k, v)
        except (KernelError, VerificationError):
            # The first failure is the one to be told; another kernel may still do.
            continue
        tell_once(matter, f"{failure}, so {name} serves: {advice}")
        return serve
    if request.prefer is Prefer.GENERATED:
        raise failure
    instead = baseline(request)
    tell_once(matter, f"{failure}, so {_in_words(instead)} serves: {advice}")
    return _baseline(instead, request)


def _instead(
    selection: Selection, target: Target, request: Request, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Selection, str]]:
    """What is tried, each with a name, where the kernel of a selection fails."""
    tuned = of_nearest(selection)
    if tuned is not None:
        yield tuned, "the config of the nearest tuned shape"
    if request.prefer is Prefer.GENERATED:
        for default in default_selections(request.problem, target, needed_specialization(request, q, k, v)):
            if default != selection:
                yield default, "a default config"


def _generated(
    selection: Selection, target: Target, request: Request, q: Tensor, k: Tensor, v: Tensor
) -> Serve:
    """A generated kernel, proven and bound to these strides.

    Raises:
        KernelError: It does not compile or load.
        VerificationError: It is wrong on this GPU.
    """
    record = selection.record
    assert record.config is not None
    kernel = kernel_of(record, needed_specialization(request, q, k, v))
    binary = binary_of(kernel, target, q.device)
    if not proven_by(selection, kernel.digest):
        problem = msgspec.structs.replace(request.problem, causal=record.problem.causal)
        if not passes_self_check(kernel, problem, record.config, target, q.device, binary):
            raise VerificationError(
                f"the {record.family} kernel for {request.problem.key} failed its self-check on {target.name}"
            )
    launch = bind(kernel, target, *request.views(q, k, v), output_like(request), compiled=binary)
    return _launcher(launch, request, q)


def _launcher(launch: Launch, request: Request, q: Tensor) -> Serve:
    """Allocates and launches: all that a call does on a shape that was met before.

    A launch reads addresses alone, its strides are bound: tensors pass in the layout they have.
    """
    default_scale = request.default_scale
    shape = request.out_shape
    if request.problem.dtype.is_quantized:
        return functools.partial(_quantized, launch, request)
    if request.return_lse:
        lse_shape = request.lse_shape

        def serve_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Result:
            out = q.new_empty(shape)
            lse = q.new_empty(lse_shape, dtype=torch.float32)
            launch(q, k, v, out, lse, default_scale if scale is None else scale)
            return out, lse

        return serve_with_lse
    if q.shape == shape and q.is_contiguous():

        def serve_alike(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Result:
            # Half the host time of an allocation by shape.
            out = torch.empty_like(q)
            launch(q, k, v, out, None, default_scale if scale is None else scale)
            return out

        return serve_alike

    def serve(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Result:
        out = q.new_empty(shape)
        launch(q, k, v, out, None, default_scale if scale is None else scale)
        return out

    return serve


def _quantized(
    launch: Launch,
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    scales: Side = NO_SIDE,
) -> Result:
    """Allocates and launches. Of the scales a server knows no more than which are given: each is checked."""
    check_scales(request.problem, q.device, scales)
    contiguous = given_scales(*(one if one is None else one.contiguous() for one in scales.scales))
    out = q.new_empty(request.out_shape, dtype=request.out_dtype)
    lse = q.new_empty(request.lse_shape, dtype=torch.float32) if request.return_lse else None
    launch(q, k, v, out, lse, request.default_scale if scale is None else scale, contiguous)
    return out if lse is None else (out, lse)


def _interpreted(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> Result:
    """The kernel under Triton's interpreter, in float32: its products of 16-bit tiles are garbage.

    Nothing is proven first: there is no binary whose rightness could hang on this machine.
    """
    assert decision.selection is not None
    assert decision.target is not None
    wide = q.float(), k.float(), v.float()
    views = request.views(*wide)
    out = wide[0].new_empty(request.out_shape)
    lse = out.new_empty(request.lse_shape) if request.return_lse else None
    problem = msgspec.structs.replace(request.problem, dtype=Dtype.FP32)
    needed = needed_specialization(request, *wide)
    record = default_selection(problem, decision.target, needed).record
    kernel = kernel_of(record, needed)
    out_view = request.heads_first(out)
    launch = bind(kernel, decision.target, *views, out_view)
    launch(*views, out_view, lse, request.default_scale if scale is None else scale)
    return out.to(q.dtype) if lse is None else (out.to(q.dtype), lse)


def _in_words(server: Server) -> str:
    return "torch's SDPA" if server is Server.SDPA else "the unfused computation"


def _baseline(server: Server, request: Request) -> Serve:
    causal = request.problem.causal
    default_scale = request.default_scale

    def serve_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Result:
        factor = default_scale if scale is None else scale
        return request.heads_first(sdpa_attention(*request.views(q, k, v), factor, causal))

    def serve_standard(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Result:
        out, lse = standard_attention(
            *request.views(q, k, v),
            scale=default_scale if scale is None else scale,
            causal=causal,
            return_lse=request.return_lse,
        )
        return request.heads_first(out) if lse is None else (request.heads_first(out), lse)

    return serve_sdpa if server is Server.SDPA else serve_standard


def _empty(
    request: Request, q: Tensor, k: Tensor, v: Tensor, scale: float | None, scales: Side = NO_SIDE
) -> Result:
    """Zeros, and the log-sum-exp of nothing."""
    del k, v, scale, scales
    out = q.new_zeros(request.out_shape, dtype=request.out_dtype)
    if not request.return_lse:
        return out
    return out, q.new_full(request.lse_shape, -torch.inf, dtype=torch.float32)


def _tell_of_fallback(selection: Selection, request: Request) -> None:
    problem = request.problem
    if selection.source == "default":
        what = f"nothing like {problem.key} is tuned for this GPU, so a default config serves"
    elif selection.source == "nearest" and is_far(selection.measured.problem, problem):
        what = f"{problem.key} is not tuned here and its nearest, {selection.measured.problem.key}, is far"
    else:
        return
    tell_once("untuned", f"{what}: run {search_command(problem)}")
