"""Executors of one kind of call: a kernel launch, Triton's interpreter, torch's SDPA or unfused.

Each is called as (q, k, v, scale) with tensors in the call's layouts. The scale is not negative, and None
means the default. Side inputs are the last argument, which problems without side inputs can omit.
"""

import contextlib
import functools
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT
from flashtune.core.layouts import Layout
from flashtune.core.problem import Dtype
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision
from flashtune.dispatch.lookup import default_selection
from flashtune.dispatch.masked_sdpa import masked_attention
from flashtune.dispatch.sdpa import SelectBackend, default_backend, sdpa_attention
from flashtune.launch.binding import bind
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.launch import Launch
from flashtune.launch.launcher import current_device
from flashtune.launch.tensors import ForwardTensors
from flashtune.launch.workspaces import allocator
from flashtune.request.quantization import check_scales, given_scales
from flashtune.request.request import Executor, Request, Result
from flashtune.request.side_inputs import side_views
from flashtune.runtime.unfused import unfused_attention


def launcher(
    launch: Launch, request: Request, q: Tensor, clear_tail: Callable[..., None] | None = None
) -> Executor:
    """Returns an executor that allocates the output and launches the kernel, without further work.

    A launch reads only addresses, because it is bound to strides. Tensors are passed in the call's layout.
    `clear_tail` clears rows of the results after the last packed sequence.
    """
    default_scale = request.default_scale
    if request.problem.dtype.is_quantized:
        return functools.partial(_quantized, launch, request)
    out_like = request.out_like
    new_out = allocator(out_like, q.device)
    lse_like = torch.empty(request.lse_shape, dtype=torch.float32, device="meta")
    new_lse = allocator(lse_like, q.device) if request.return_lse else None
    # None on a CPU, in tests.
    index = q.device.index

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        if index is not None and current_device() != index:
            with torch.cuda.device(index):
                return run(q, k, v, scale, side)
        out = new_out()
        lse = None if new_lse is None else new_lse()
        launch((q, k, v, out, lse), default_scale if scale is None else scale, side)
        if clear_tail is not None:
            clear_tail(out, lse, side.cu_seqlens_q)
        return out if lse is None else (out, lse)

    kind = (out_like.shape, out_like.stride(), out_like.dtype, q.device)

    def write(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs) -> bool:
        """Launches the kernel with another output, and returns whether it can be written."""
        form = out.shape, out.stride(), out.dtype, out.device
        if form != kind or out.data_ptr() % POINTER_ALIGNMENT:
            return False
        if index is not None and current_device() != index:
            with torch.cuda.device(index):
                return write(out, q, k, v, scale, side)
        launch((q, k, v, out, None), default_scale if scale is None else scale, side)
        return True

    if new_lse is None:
        run.write = write  # type: ignore[attr-defined]
    return run


def with_copies(executor: Executor, flags: tuple[bool, bool, bool]) -> Executor:
    """Returns an executor that gets contiguous copies of the flagged tensors of q, k and v.

    During the capture of a CUDA graph, the copies are in the memory of the graph.
    """
    if not any(flags):
        return executor

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        return executor(*copies_of((q, k, v), flags), scale, side)

    return run


def copies_of(
    tensors: tuple[Tensor, Tensor, Tensor], flags: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, with contiguous copies of the flagged ones."""
    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format) if flag else tensor
        for tensor, flag in zip(tensors, flags, strict=True)
    )
    return q, k, v


def write_output(
    executor: Executor,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> None:
    """Writes the output of a call to `out`, which its kernel writes directly if it can.

    The executor returns no log-sum-exp. `out` has the shape of its output and overlaps no input. Its rows
    after the last packed sequence are zero or stay as they are.
    """
    # Executors that return a log-sum-exp, and those without a kernel, have no such function.
    write: Callable[..., bool] | None = getattr(executor, "write", None)
    if write is None or not write(out, q, k, v, scale, side):
        result = executor(q, k, v, scale, side)
        assert isinstance(result, Tensor)
        out.copy_(result)


def _quantized(
    launch: Launch,
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
) -> Result:
    """Checks the scales, allocates the output and launches the kernel."""
    check_scales(request.problem, q.device, scales)
    contiguous = given_scales(
        *(factor if factor is None else factor.contiguous() for factor in scales.scales)
    )
    out = q.new_empty(request.out_shape, dtype=request.out_dtype)
    lse = q.new_empty(request.lse_shape, dtype=torch.float32) if request.return_lse else None
    launch((q, k, v, out, lse), request.default_scale if scale is None else scale, contiguous)
    return out if lse is None else (out, lse)


def interpreted(
    decision: Decision,
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> Result:
    """Runs the kernel under Triton's interpreter in float32, because its 16-bit matrix products are wrong.

    The kernel is not verified first, because there is no binary that depends on this machine.
    """
    assert decision.target is not None
    stored = request.problem.kv_dtype is not None
    wide = q.float(), k if stored else k.float(), v if stored else v.float()
    if side.bias is not None and side.bias.dtype is not torch.bool:
        side = side._replace(bias=side.bias.float())
    out = torch.empty_like(request.out_like, dtype=torch.float32, device=q.device)
    lse = out.new_empty(request.lse_shape) if request.return_lse else None
    problem = msgspec.structs.replace(request.problem, dtype=Dtype.FP32)
    needed = BoundRequest(request, *wide, side).forward_properties
    record = default_selection(problem, decision.target, needed).record
    out_view = request.layout.heads_first(out)
    tensors = ForwardTensors(*request.views(*wide), out_view, lse)
    extra = side_views(problem, side, tensors.k.shape[0])
    launch = bind(kernel_of(record, needed), decision.target, tensors, extra)
    launch(tensors, request.default_scale if scale is None else scale, extra)
    if problem.packed:
        clear_tail_on_cpu(out, lse, side.cu_seqlens_q)
    return out.to(q.dtype) if lse is None else (out.to(q.dtype), lse)


def clear_tail_on_cpu(out: Tensor, lse: Tensor | None, starts: Tensor | None) -> None:
    """Clears the rows of outputs on the CPU after the last packed sequence."""
    assert starts is not None
    end = int(starts[-1])
    out[end:] = 0.0
    if lse is not None:
        lse[:, end:] = -torch.inf


def in_words(backend: Backend) -> str:
    """Returns the name of a baseline for use in messages."""
    return "torch's SDPA" if backend is Backend.SDPA else "the unfused computation"


def baseline_executor(backend: Backend, request: Request) -> Executor:
    """Returns an executor by SDPA, which gets no features here, or by the unfused computation."""
    problem = request.problem
    assert backend is Backend.UNFUSED or not problem.features, "SDPA would ignore them"
    default_scale, layout = request.default_scale, request.layout

    def run_sdpa(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, _: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        factor = default_scale if scale is None else scale
        with types_as_given(q):
            return layout.as_given(sdpa_attention(*request.views(q, k, v), factor, problem.causal))

    def run_unfused(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        views, factor = request.views(q, k, v), default_scale if scale is None else scale
        with types_as_given(q):
            extra = side_views(problem, side, views[1].shape[0])
            out, lse = unfused_attention(problem, *views, extra, scale=factor, return_lse=request.return_lse)
        return layout.as_given(out) if lse is None else (layout.as_given(out), lse.view(request.lse_shape))

    return run_unfused if backend is Backend.UNFUSED else run_sdpa


def masked_executor(request: Request, backend: str | None, select: SelectBackend) -> Executor:
    """Returns an executor by SDPA with a mask, or unfused if SDPA selects another backend at the call.

    `select` returns the backend that SDPA selects.
    """
    default_scale, layout, problem = request.default_scale, request.layout, request.problem
    standard = baseline_executor(Backend.UNFUSED, request)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs) -> Result:
        assert side.bias is not None
        views = request.views(q, k, v)
        # torch's settings may have changed since the executor was made.
        if default_backend(*views, problem.causal, side.bias, select) != backend:
            return standard(q, k, v, scale, side)
        with types_as_given(q):
            factor = default_scale if scale is None else scale
            return layout.as_given(masked_attention(*views, side.bias, factor, problem.causal))

    return run


def types_as_given(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disables autocast, which would convert scores and results to 16 bits."""
    device = q.device.type
    casting = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if casting else contextlib.nullcontext()


def nothing(
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> Result:
    """Returns zeros with zero gradients. The log-sum-exp is -inf, or the sink's logit."""
    del scale
    out = q.new_zeros(request.out_shape, dtype=request.out_dtype)
    lse = q.new_full(request.lse_shape, -torch.inf, dtype=request.lse_dtype)
    if side.sinks is not None:
        heads = (-1,) if request.layout is Layout.BHD else (-1, 1)
        lse = lse.copy_(side.sinks.view(heads))
    if request.needs_grad:
        # Sums of no elements connect the result to all inputs in autograd's graph.
        inputs = (tensor for tensor in (q, k, v, *side.tensors) if tensor.requires_grad)
        way = torch.stack([tensor[..., :0].sum(dtype=out.dtype) for tensor in inputs]).sum()
        out, lse = out + way, lse + way.to(lse.dtype)
    return (out, lse) if request.return_lse else out
