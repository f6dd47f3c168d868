"""Executors of the backward pass of one kind of call: kernels, Triton's interpreter, or unfused.

The gradient of the output comes from other code and may be expanded or transposed. If the kernel can address
it, the kernel reads it directly. Otherwise it is copied, so that no kernel is compiled during a backward
pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.features.table import TENSOR_INPUTS, score_tensors
from flashtune.core.features.table_gradients import gradient_numbers, table_gradients
from flashtune.core.kernel import POINTER_ALIGNMENT, Kernel, Specialization
from flashtune.core.layouts import Layout
from flashtune.core.problem import Dtype, Problem
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision
from flashtune.dispatch.lookup import default_selection
from flashtune.dispatch.platform import Platform
from flashtune.launch.binding import bind
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.launch import Launch
from flashtune.launch.launcher import current_device
from flashtune.launch.workspaces import allocator
from flashtune.request.gradients import BackwardExecutor, BackwardInputs, Gradients
from flashtune.request.request import Request, Result
from flashtune.request.side_inputs import side_views
from flashtune.runtime.executors import baseline_executor, copies_of
from flashtune.runtime.kernel_loader import LoadedKernel

# Maximum number of cached launches. A program may pass gradients with ever new strides.
MAX_LAUNCHES = 64


class Bound(NamedTuple):
    """A launch, functions that allocate dq, dk and dv on the current device, and which inputs are copied."""

    launch: Launch
    new_dq: Callable[[], Tensor]
    new_dk: Callable[[], Tensor]
    new_dv: Callable[[], Tensor]
    copies: tuple[bool, bool, bool] | None = None


class BoundBackward:
    """A verified backward kernel, which is bound once to each set of strides."""

    __slots__ = (
        "_bind_kernel",
        "_choice",
        "_default_scale",
        "_index",
        "_launches",
        "_platform",
        "_problem",
        "_request",
        "_writes",
    )

    def __init__(
        self, choice: LoadedKernel, request: Request, platform: Platform, bind_kernel: Callable[..., Launch]
    ) -> None:
        self._choice = choice
        self._platform = platform
        self._bind_kernel = bind_kernel
        self._request = request
        self._problem = request.backward
        self._default_scale = request.default_scale
        self._writes = _written(choice.kernel)
        # None on a CPU, in tests.
        self._index = request.device.index
        # The key is the strides of all inputs, which hooks of saved tensors may change. The value is None if
        # the output's gradient must be copied first.
        self._launches: dict[tuple[object, ...], Bound | None] = {}

    def __call__(self, inputs: BackwardInputs) -> Gradients:
        """Returns the gradients."""
        q, k, v, out, lse, dout, dlse, scale, side = inputs
        if dout.data_ptr() % POINTER_ALIGNMENT:
            dout = dout.clone()
        if dlse is not None:
            dlse = dlse.contiguous()
        lse = lse.contiguous()
        key = _strides(q, k, v, out, dout, side)
        bound = self._launches.get(key)
        if bound is None:
            if key not in self._launches:
                if len(self._launches) >= MAX_LAUNCHES:
                    self._launches.clear()
                request = BoundRequest(self._request, q, k, v, side, self._platform)
                self._launches[key] = self._bind(request, out, dout)
            else:
                q, k, v, out, dout = self._addressable(q, k, v, out, dout)
            return self(BackwardInputs(q, k, v, out, lse, dout, dlse, scale, side))
        scale = self._default_scale if scale is None else scale
        gradients = _allocated(self._request, q, k, v, self._writes)
        dtables = _table_buffer(self._problem, q, side, self._writes)
        if bound.copies is not None:
            q, k, v = copies_of((q, k, v), bound.copies)
        dq, dk, dv, dsinks, dbias, dslopes, *_ = gradients
        bound.launch(
            (q, k, v, out, lse, dout, dq, dk, dv, dlse, dbias, dslopes, dsinks, dtables), scale, side
        )
        return gradients if dtables is None else with_tables(gradients, self._problem, side, dtables)

    def plainly(self, inputs: BackwardInputs) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k and v with less overhead, without side inputs and `dlse`."""
        q, k, v, out, lse, dout, _, scale, _ = inputs
        bound = self._launches.get((q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()))
        elsewhere = self._index is not None and current_device() != self._index
        unaligned = dout.data_ptr() % POINTER_ALIGNMENT or not lse.is_contiguous()
        if bound is None or elsewhere or unaligned or bound.copies is not None:
            return self(inputs)
        launch, new_dq, new_dk, new_dv, _ = bound
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        tensors = q, k, v, out, lse, dout, dq, dk, dv, None, None, None, None, None
        launch(tensors, self._default_scale if scale is None else scale)
        return dq, dk, dv

    def bind_usual(self, bound: BoundRequest) -> None:
        """Binds the kernel to a gradient with the strides of the output."""
        out = self._request.out_like
        self._launches[_strides(*bound.tensors, out, out, bound.side)] = self._bind(bound, out, out)

    def _bind(self, bound: BoundRequest, out: Tensor, dout: Tensor) -> Bound | None:
        tensors = bound.backward_tensors(out, out, dout, bound.tensors[0].device)
        kernel, target, binary = self._choice
        has_rows = all(map(_has_rows, (*bound.tensors, out, dout)))
        if has_rows and _covers(kernel.specialization, bound.properties_of(tensors)):
            launch = self._bind_kernel(kernel, target, tensors, bound.extra, binary)
            new_dq, new_dk, new_dv = (
                allocator(torch.empty_like(tensor, device="meta"), tensor.device) for tensor in bound.tensors
            )
            return Bound(launch, new_dq, new_dk, new_dv, bound.copied if any(bound.copied) else None)
        return None

    def _addressable(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """Returns tensors of other strides: with a contiguous gradient, or if it is, all with padded rows."""
        contiguous = torch.empty(dout.shape, device="meta").stride()
        if dout.stride() != contiguous:
            # A contiguous tensor may have unusual strides in dimensions of size 1.
            return q, k, v, out, dout.clone(memory_format=torch.contiguous_format)
        originals = q, k, v, out
        copies = tuple(map(_with_padded_rows, originals))
        if [tensor.stride() for tensor in copies] == [tensor.stride() for tensor in originals]:
            raise KernelError(
                "tensors that were saved for the backward pass came back with strides that its kernel cannot "
                "address: let hooks of saved tensors keep their strides"
            )
        return *copies, dout


def _strides(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, side: ExtraInputs
) -> tuple[object, ...]:
    """Returns the strides of all tensors that a launch is bound to."""
    strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
    if side is NO_EXTRA_INPUTS:
        return strides
    own = side.bias, side.slopes, side.block_counts, side.block_indices, side.full_counts
    return (*strides, *(None if tensor is None else tensor.stride() for tensor in own))


def _written(kernel: Kernel) -> tuple[str, ...]:
    """Returns the names of the gradients of side inputs that a kernel writes."""
    return tuple(name for name in ("dsinks", "dbias", "dslopes", "dtables") if kernel.writes(name))


def _allocated(request: Request, q: Tensor, k: Tensor, v: Tensor, writes: tuple[str, ...]) -> Gradients:
    """Allocates the gradients that a kernel writes. `writes` are the names of those of side inputs."""
    problem = request.problem
    # Kernels do not write rows after the last packed sequence, whose gradients are zero.
    make = torch.zeros_like if problem.packed else torch.empty_like
    heads = problem.batch, problem.heads
    dbias = dslopes = dsinks = None
    if "dbias" in writes:
        dbias = q.new_empty(*heads, problem.seqlen_q, problem.seqlen_kv)
    if "dslopes" in writes:
        dslopes = q.new_empty(heads, dtype=torch.float32)
    if "dsinks" in writes:
        dsinks = q.new_empty(heads, dtype=torch.float32)
    return Gradients(make(q), make(k), make(v), dsinks, dbias, dslopes)


def _table_buffer(problem: Problem, q: Tensor, side: ExtraInputs, writes: tuple[str, ...]) -> Tensor | None:
    """Allocates the buffer for gradients of captured tensors, which kernels clear."""
    if "dtables" not in writes:
        return None
    return q.new_empty(gradient_numbers(problem, side), dtype=torch.float32)


def with_tables(gradients: Gradients, problem: Problem, side: ExtraInputs, dtables: Tensor) -> Gradients:
    """Returns gradients with those of captured tensors, in the types of these."""
    tables = table_gradients(problem, side, dtables)
    return gradients._replace(
        **{f"d{name}": gradient.to(getattr(side, name).dtype) for name, gradient in tables.items()}
    )


def _covers(assumed: Specialization, needed: Specialization) -> bool:
    """Returns whether a kernel with these assumptions is correct for tensors with these properties."""
    return assumed.alignment <= needed.alignment and assumed.index_bits >= needed.index_bits


def _with_padded_rows(tensor: Tensor) -> Tensor:
    """Returns a copy whose strides are multiples of all alignments."""
    width = -(-tensor.shape[-1] // POINTER_ALIGNMENT) * POINTER_ALIGNMENT
    return tensor.new_empty(*tensor.shape[:-1], width)[..., : tensor.shape[-1]].copy_(tensor)


def with_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor with a contiguous last dimension, a copy if needed."""
    return tensor if _has_rows(tensor) else tensor.contiguous()


def _has_rows(tensor: Tensor) -> bool:
    """Returns whether the last dimension is contiguous, as kernels require."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def interpreted_backward(decision: Decision, request: Request, inputs: BackwardInputs) -> Gradients:
    """Runs kernels under Triton's interpreter in float32, as `flashtune.runtime.executors.interpreted`."""
    q, k, v, out, lse, dout, dlse, scale, side = inputs
    assert decision.target is not None
    wide = (tensor.float() for tensor in (q, k, v, out))
    q_wide, k_wide, v_wide, out_wide = map(with_rows, wide)
    lse = lse.contiguous()
    dout_wide = dout.float().contiguous()
    if side.bias is not None and side.bias.dtype is not torch.bool:
        side = side._replace(bias=side.bias.float())
    bound = BoundRequest(request, q_wide, k_wide, v_wide, side)
    allocated = bound.backward_tensors(out_wide, lse, dout_wide)
    needed = bound.properties_of(allocated)
    problem = msgspec.structs.replace(request.backward, dtype=Dtype.FP32)
    kernel = kernel_of(default_selection(problem, decision.target, needed).record, needed)
    made = _allocated(request, q_wide, k_wide, v_wide, _written(kernel))
    dq, dk, dv = request.views(*made[:3])
    tensors = allocated._replace(
        dq=dq,
        dk=dk,
        dv=dv,
        dlse=None if dlse is None else dlse.contiguous(),
        dbias=made.dbias,
        dslopes=made.dslopes,
        dsinks=made.dsinks,
        dtables=_table_buffer(problem, q, bound.extra, _written(kernel)),
    )
    launch = bind(kernel, decision.target, tensors, bound.extra)
    launch(tensors, request.default_scale if scale is None else scale, bound.extra)
    if tensors.dtables is not None:
        made = with_tables(made, problem, bound.extra, tensors.dtables)
    narrow = {"dq": made.dq.to(q.dtype), "dk": made.dk.to(k.dtype), "dv": made.dv.to(v.dtype)}
    return made._replace(**narrow, dbias=made.dbias if made.dbias is None else made.dbias.to(q.dtype))


def recomputed(request: Request) -> BackwardExecutor:
    """Returns an executor that computes the forward pass again, unfused, and differentiates it.

    As with kernels, the given output and log-sum-exp may be those over more keys than the call's.
    """
    standard = baseline_executor(Backend.UNFUSED, request.forward)
    names = [name for name in score_tensors(request.problem) if TENSOR_INPUTS[name].has_gradient]

    def run(inputs: BackwardInputs) -> Gradients:
        q, k, v, scale, side = *inputs[:3], inputs.scale, inputs.side
        if request.is_empty:
            return Gradients(*map(torch.zeros_like, (q, k, v)))
        views = side_views(request.problem, side, request.views(q, k, v)[1].shape[0])
        with _autograd_inside_operator():
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            given = {name: tensor for name in names if (tensor := getattr(views, name)) is not None}
            detached = {name: tensor.detach() for name, tensor in given.items()}
            # A boolean mask has no gradient.
            floats = {name: tensor for name, tensor in detached.items() if tensor.is_floating_point()}
            extra = {name: tensor.clone().requires_grad_() for name, tensor in floats.items()}
            result = standard(*leaves, scale, side._replace(**extra))
            wanted = _of_given_softmax(request, result, inputs)
            # A score function may have a result that does not depend on the score, or on a captured tensor.
            differentiated = (*leaves, *extra.values())
            results = torch.autograd.grad(
                result, differentiated, wanted, allow_unused=True, materialize_grads=True
            )
        # Return the strides that the fake implementation declares to compilers.
        gradients = Gradients(*map(_with_layout_of, (q, k, v), results))
        return gradients._replace(
            **{f"d{name}": gradient for name, gradient in zip(extra, results[3:], strict=True)}
        )

    return run


def _of_given_softmax(request: Request, result: Result, inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a call's own output and log-sum-exp, from those of a softmax over more keys.

    The weights of that softmax are a share of the own ones in each row.
    """
    out, lse, dout, dlse = inputs.out, inputs.lse, inputs.dout, inputs.dlse
    own_out, own_lse = (tensor.detach() for tensor in result)
    share = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0.0)
    by_row = share if request.layout in (Layout.BHSD, Layout.BHD) else share.transpose(-1, -2)
    own_dout = (dout * by_row.unsqueeze(-1)).to(dout.dtype)
    sums = (dout.to(lse.dtype) * (own_out - out).to(lse.dtype)).sum(-1)
    sums = sums if request.layout in (Layout.BHSD, Layout.BHD) else sums.transpose(-1, -2)
    return own_dout, share * (sums if dlse is None else sums + dlse)


def _with_layout_of(tensor: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(values)


@contextlib.contextmanager
def _autograd_inside_operator() -> Iterator[None]:
    """Enables autograd within an operator, where the dispatcher has excluded it."""
    included = torch._C._dispatch_tls_local_include_set()
    # Removing the key of one device enables autograd on all devices.
    recording = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(included, recording), torch.enable_grad():
        yield
