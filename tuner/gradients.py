"""Gradients to time: what a backward kernel is given, and what autograd makes of other forward passes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from flashtune.backward import BackwardTensors
from flashtune.dispatch import default_selection
from flashtune.features import Bias
from flashtune.kernel import specialization_of
from flashtune.launch import Binary, bind, compile_binary
from flashtune.rendered import kernel_of
from flashtune.standard_features import standard_features
from flashtune.target import device_target
from flashtune.tuner.passes import forward_of

if TYPE_CHECKING:
    from flashtune.kernel import Kernel, Specialization
    from flashtune.problem import Problem
    from flashtune.target import Target
    from flashtune.tuner.measurement import Run
    from flashtune.tuner.tensors import Tensors


def gradient_tensors(problem: Problem, tensors: Tensors) -> BackwardTensors:
    """What the kernels of a backward problem read and write: a right output, and its random gradient.

    Args:
        problem: The backward problem.
        tensors: Its inputs, and room for the output of the forward pass, which is filled.
    """
    q, k, v, out = tensors.q, tensors.k, tensors.v, tensors.out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _run_forward(forward_of(problem), tensors, lse)
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
    )


def _run_forward(problem: Problem, tensors: Tensors, lse: Tensor) -> None:
    """The forward pass, by the default kernel of the GPU; on the CPU, where problems are small, by torch."""
    q, k, v, out, side = tensors.q, tensors.k, tensors.v, tensors.out, tensors.side
    if q.device.type == "cpu":
        made, its_lse = standard_features(problem, q, k, v, side, scale=tensors.scale, return_lse=True)
        assert its_lse is not None
        out.copy_(made)
        lse.copy_(its_lse)
        return
    target = device_target(q.device.index or 0)
    specialization = specialization_of((q, k, v, out), lse=True, bias=side.bias)
    kernel, binary = _default_kernel(problem, target, specialization)
    launch = bind(kernel, target, q, k, v, out, side, compiled=binary)
    launch(q, k, v, out, lse, tensors.scale, side)


@functools.lru_cache(maxsize=8)
def _default_kernel(
    problem: Problem, target: Target, specialization: Specialization
) -> tuple[Kernel, Binary]:
    """Kept: every candidate of a search is given fresh tensors."""
    record = default_selection(problem, target, specialization).record
    kernel = kernel_of(record, specialization)
    return kernel, compile_binary(kernel, target)


def differentiable(tensors: Tensors) -> Tensors:
    """The same inputs as leaves of autograd, an additive bias among them."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
    bias, side = tensors.side.bias, tensors.side
    if bias is not None and bias.is_floating_point():
        side = side._replace(bias=bias.detach().requires_grad_())
    return msgspec.structs.replace(tensors, q=q, k=k, v=v, side=side)


def gradient_run(forward: Run, tensors: Tensors) -> Run:
    """The backward pass alone of what a forward pass computes from differentiable inputs.

    The forward pass runs here, once; each run then makes the gradients of q, k and v, and of an additive
    bias, from what it saved.

    Args:
        forward: Gives the output, or a tuple that starts with it.
        tensors: What it computes it from, as `differentiable` made them of a backward problem's.

    Raises:
        RuntimeError: It does not take such inputs.
    """
    assert tensors.backward is not None
    with torch.enable_grad():
        result = forward()
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    given = (tensors.q, tensors.k, tensors.v, tensors.side.bias)
    leaves = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    dout = tensors.backward.dout
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
