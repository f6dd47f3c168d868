"""Checks of the tensors of a dense call."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_TOKENS, kind_of
from flashtune.core.errors import ProblemError
from flashtune.core.layouts import DTYPES, Layout
from flashtune.core.problem import MAX_HEAD_DIM, Dtype, Problem

MAX_HEADS = 2**24


def require_dense(name: str, value: object) -> None:
    """Checks that an argument is a dense, strided tensor.

    Raises:
        ProblemError: It is not a tensor, or is sparse or nested.
    """
    if not isinstance(value, Tensor):
        raise ProblemError(f"{name} is {kind_of(value)}: pass a torch tensor")
    if value.is_nested:
        raise ProblemError(f"{name} is a nested tensor: pass a dense one, or packed ones to attention_varlen")
    if value.layout is not torch.strided:
        raise ProblemError(f"{name} has layout {value.layout}: pass {name}.to_dense()")


def check_extents(problem: Problem) -> None:
    """Checks that numbers of sequences, heads and tokens are within the limits of kernels.

    Raises:
        ProblemError: A number is too large.
    """
    for name, size, most in (
        ("sequences", problem.batch, MAX_TOKENS),
        ("query heads", problem.heads, MAX_HEADS),
        ("queries", problem.seqlen_q, MAX_TOKENS),
        ("keys", problem.seqlen_kv, MAX_TOKENS),
    ):
        if size > most:
            raise ProblemError(f"the tensors have {size} {name}: kernels take at most {most}")


def dtype_of(q: Tensor) -> Dtype:
    """Returns the element type of a problem. float64, which no kernel takes, counts as fp32."""
    return Dtype.FP32 if q.dtype is torch.float64 else DTYPES[q.dtype]


def check_double(q: Tensor, generated: bool) -> None:
    """Rejects float64 if only generated kernels may serve.

    Raises:
        ProblemError: The tensor is float64, and only generated kernels may serve.
    """
    if q.dtype is torch.float64 and generated:
        raise ProblemError(
            "q is torch.float64: no kernel takes it, pass bfloat16, float16, float32 or float8_e4m3fn, or "
            "prefer='fastest' to use the unfused computation"
        )


def check_tensor(name: str, tensor: Tensor, layout: Layout) -> None:
    """Checks the rank, type, head dim and last stride of a tensor.

    Raises:
        ProblemError: No kernel takes the tensor.
    """
    order = (
        "[batch, heads, seqlen, head_dim]" if layout is Layout.BHSD else "[batch, seqlen, heads, head_dim]"
    )
    if tensor.dim() != 4:
        raise ProblemError(f"{name} has {tensor.dim()} dimensions: pass a dense tensor {order}")
    if tensor.dtype not in DTYPES and tensor.dtype is not torch.float64:
        raise ProblemError(
            f"{name} is {tensor.dtype}: no kernel takes it, pass bfloat16, float16, float32 or float8_e4m3fn"
        )
    if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
        raise ProblemError(f"{name} has head dim {tensor.shape[3]}: kernels take 1 to {MAX_HEAD_DIM}")
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        raise ProblemError(f"{name}'s last dimension has stride {tensor.stride(3)}: pass {name}.contiguous()")


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks that q, k and v have the same type and device.

    Raises:
        ProblemError: They differ in type or device.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ProblemError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: give them one dtype")
    if not q.device == k.device == v.device:
        raise ProblemError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}: move them to one device"
        )


def check_shapes(q: Tensor, k: Tensor, v: Tensor, heads_axis: int, length_axis: int) -> None:
    """Checks that the shapes of q, k and v match, with heads and lengths at the given axes.

    Raises:
        ProblemError: The shapes do not match.
    """
    batches = q.shape[0], k.shape[0], v.shape[0]
    if not batches[0] == batches[1] == batches[2]:
        raise ProblemError("q, k and v have batch sizes {}, {} and {}: make them equal".format(*batches))
    if k.shape[1:3] != v.shape[1:3]:
        raise ProblemError(
            f"k has {k.shape[heads_axis]} heads of {k.shape[length_axis]} keys and v has "
            f"{v.shape[heads_axis]} of {v.shape[length_axis]}: make them equal"
        )
    if q.shape[3] != k.shape[3]:
        raise ProblemError(f"q has head dim {q.shape[3]} and k has {k.shape[3]}: make them equal")
    heads, kv_heads = q.shape[heads_axis], k.shape[heads_axis]
    if not heads or not kv_heads or heads % kv_heads:
        raise ProblemError(
            f"{heads} query heads do not divide among {kv_heads} KV heads: check the shapes "
            "and layout='bhsd' or 'bshd'"
        )
