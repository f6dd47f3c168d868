"""Random tensors of a problem, to time candidates and baselines of both passes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.features.table import SEED, usual_inputs
from flashtune.core.features.table_gradients import gradient_numbers
from flashtune.core.kernel import Kernel, Specialization, specialization_of
from flashtune.core.layouts import LARGEST_STORED, STORED_DTYPES, TORCH_DTYPES
from flashtune.core.problem import Bias, KvDtype, KvScale, Problem
from flashtune.core.target import Target, device_target
from flashtune.dispatch.lookup import default_selection
from flashtune.launch.binding import Binary, bind, compile_binary
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.request.quantization import quantize
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.workloads.models import forward_of
from flashtune.verification.inputs.placement import key_shape, make_table, sequence_inputs
from flashtune.verification.lengths import usual_lengths

if TYPE_CHECKING:
    from flashtune.tuner.execution.timing import Run

# Standard deviation of values stored in 8 bits: nearly all are in range.
STORED_SPREAD = {KvDtype.E4M3: 64.0, KvDtype.INT8: 32.0}


class Tensors(msgspec.Struct, frozen=True):
    """Random inputs of a problem and a buffer for its output, with heads before tokens.

    Contiguous [batch, heads, seqlen, head_dim]. Varlen and paged tensors are views of
    [tokens, heads, head_dim] and [pages, page_size, kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    side: ExtraInputs = NO_EXTRA_INPUTS
    # Buffer for the log-sum-exp, float32 [batch, heads, seqlen_q], if requested.
    lse: Tensor | None = None
    # All tensors that kernels of a backward problem read and write, including these.
    backward: BackwardTensors | None = None

    @property
    def scale(self) -> float:
        """Returns the default softmax scale."""
        return float(self.q.shape[-1] ** -0.5)


def make_tensors(problem: Problem, device: torch.device, *, lse: bool = False) -> Tensors:
    """Returns new random inputs, quantised if the problem is.

    Lengths of sequences are `usual_lengths` of the problem, and pages are shuffled. Both are the same in
    every call. The forward pass of a backward problem runs here. `lse` adds a buffer for the log-sum-exp of a
    forward pass.
    """
    tensors = make_inputs(problem, device)
    if problem.is_backward:
        return msgspec.structs.replace(tensors, backward=gradient_tensors(problem, tensors))
    if not lse:
        return tensors
    room = torch.empty(tensors.q.shape[:3], dtype=torch.float32, device=device)
    return msgspec.structs.replace(tensors, lse=room)


def make_inputs(problem: Problem, device: torch.device) -> Tensors:
    """Returns random inputs and a buffer for the output of the forward pass only."""
    lengths = usual_lengths(problem)
    dtype = TORCH_DTYPES[problem.dtype]
    side = ExtraInputs(**usual_inputs(problem, problem.features, lengths.keys, dtype, device))
    table = make_table(problem, lengths, torch.Generator().manual_seed(SEED)) if problem.page_size else None
    sequences = sequence_inputs(problem, lengths, table).items()
    located: dict[str, Any] = {name: tensor.to(device) for name, tensor in sequences}
    side = side._replace(**located)
    keys = key_shape(problem, lengths, table)
    rows = (1, lengths.total_q) if problem.packed else (problem.batch, problem.seqlen_q)
    tokens_first = bool(problem.packed or problem.page_size)
    final = TORCH_DTYPES[problem.out_dtype]
    low = final if problem.dtype.is_quantized else TORCH_DTYPES[problem.dtype]
    q = _random((rows[0], problem.heads, rows[1], problem.head_dim), low, tokens_first, device)
    out = _shaped((*q.shape[:3], problem.value_head_dim), final, tokens_first, device)
    k, k_scale = _stored((*keys, problem.head_dim), problem, tokens_first, device)
    if problem.mla:
        v, v_scale = k[..., : problem.value_head_dim], k_scale
    else:
        v, v_scale = _stored((*keys, problem.value_head_dim), problem, tokens_first, device)
    if problem.dtype.is_quantized:
        (q, q_scale), (k, k_scale), (v, v_scale) = map(quantize, (q, k, v))
        side = side._replace(q_scale=q_scale)
    return Tensors(q, k, v, out, side._replace(k_scale=k_scale, v_scale=v_scale))


def _stored(
    shape: tuple[int, ...], problem: Problem, tokens_first: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Returns random keys or values, with their scales if the KV cache is quantised."""
    low = torch.bfloat16 if problem.dtype.is_quantized else TORCH_DTYPES[problem.dtype]
    values = _random(shape, low, tokens_first, device)
    kind = problem.kv_dtype
    if kind is None:
        return values, None
    spread = STORED_SPREAD[kind]
    limit = LARGEST_STORED[kind]
    values = values.mul_(spread).clamp_(-limit, limit)
    stored = (values.round_() if kind is KvDtype.INT8 else values).to(STORED_DTYPES[kind])
    # Scales per head or page are separate elements, so that a kernel reads all of them.
    own = {KvScale.TENSOR: (1, 1), KvScale.HEAD: (1, shape[1]), KvScale.PAGE: (shape[0], shape[1])}
    blocks = shape[0] if problem.page_size else problem.batch
    scales = torch.full(own[problem.kv_scale], 1 / spread, device=device)
    return stored, scales.expand(blocks, shape[1])


def _random(shape: tuple[int, ...], dtype: torch.dtype, tokens_first: bool, device: torch.device) -> Tensor:
    return _shaped(shape, dtype, tokens_first, device).normal_()


def _shaped(shape: tuple[int, ...], dtype: torch.dtype, tokens_first: bool, device: torch.device) -> Tensor:
    """Returns an empty tensor of a heads-first shape; with `tokens_first`, tokens precede heads in memory."""
    batch, heads, rows, width = shape
    if not tokens_first:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(batch, rows, heads, width, dtype=dtype, device=device).transpose(1, 2)


def gradient_tensors(problem: Problem, tensors: Tensors) -> BackwardTensors:
    """Returns the tensors of a backward problem: the correct output, a random gradient, and buffers."""
    q, k, v, out = tensors.q, tensors.k, tensors.v, tensors.out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _run_forward(forward_of(problem), tensors, lse)
    numbers = gradient_numbers(problem, tensors.side)
    return BackwardTensors(
        q,
        k,
        v,
        out,
        lse,
        dout=torch.empty_like(out).normal_(),
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dv=torch.empty_like(v),
        dbias=q.new_empty(*q.shape[:3], k.shape[2]) if problem.bias is Bias.ADDITIVE else None,
        dslopes=torch.empty(q.shape[:2], device=q.device) if problem.alibi else None,
        dsinks=torch.empty(problem.batch, problem.heads, device=q.device) if problem.sinks else None,
        dtables=torch.empty(numbers, device=q.device) if numbers else None,
    )


def _run_forward(problem: Problem, tensors: Tensors, lse: Tensor) -> None:
    """Runs the forward pass: on a GPU by its default kernel, on the CPU by unfused attention."""
    q, k, v, out, side = tensors.q, tensors.k, tensors.v, tensors.out, tensors.side
    if q.device.type == "cpu":
        made, its_lse = unfused_attention(problem, q, k, v, side, scale=tensors.scale, return_lse=True)
        assert its_lse is not None
        out.copy_(made)
        lse.copy_(its_lse)
        return
    target = device_target(q.device.index or 0)
    specialization = specialization_of((q, k, v, out), lse=True, bias=side.bias)
    kernel, binary = _default_kernel(problem, target, specialization)
    launch = bind(kernel, target, ForwardTensors(q, k, v, out), side, compiled=binary)
    launch((q, k, v, out, lse), tensors.scale, side)


@functools.lru_cache(maxsize=8)
def _default_kernel(
    problem: Problem, target: Target, specialization: Specialization
) -> tuple[Kernel, Binary]:
    """Returns the default kernel and its binary. Cached, because every candidate gets new tensors."""
    record = default_selection(problem, target, specialization).record
    kernel = kernel_of(record, specialization)
    return kernel, compile_binary(kernel, target)


def differentiable(tensors: Tensors) -> Tensors:
    """Returns the same inputs as leaves of autograd, including an additive bias."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
    bias, side = tensors.side.bias, tensors.side
    if bias is not None and bias.is_floating_point():
        side = side._replace(bias=bias.detach().requires_grad_())
    return msgspec.structs.replace(tensors, q=q, k=k, v=v, side=side)


def gradient_run(forward: Run, tensors: Tensors) -> Run:
    """Runs a forward pass once, and returns a callable that runs only its backward pass.

    Each run computes the gradients of q, k and v, and of an additive bias, from the saved tensors. `forward`
    returns the output, or a tuple that starts with it. `differentiable` gives its inputs.
    """
    assert tensors.backward is not None
    with torch.enable_grad():
        result = forward()
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    inputs = (tensors.q, tensors.k, tensors.v, tensors.side.bias)
    leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    dout = tensors.backward.dout
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
