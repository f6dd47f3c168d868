"""Checks of single tensors, and of the extents and types that kernels take."""

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_TOKENS, kind_of
from flashtune.core.errors import ProblemError
from flashtune.core.layouts import DTYPES
from flashtune.core.problem import Dtype, Problem

MAX_HEADS = 2**24
# Of all of torch's settings: `set_float32_matmul_precision`, `allow_tf32` and `fp32_precision`.
fp32_precision = torch._C._get_fp32_precision_getter


def require_dense(name: str, value: object) -> None:
    """Checks that an argument is a dense, strided tensor."""
    if not isinstance(value, Tensor):
        raise ProblemError(f"{name} is {kind_of(value)}: pass a torch tensor")
    if value.is_nested:
        raise ProblemError(f"{name} is a nested tensor: pass a dense one, or packed ones to attention_varlen")
    if value.layout is not torch.strided:
        raise ProblemError(f"{name} has layout {value.layout}: pass {name}.to_dense()")


def check_extents(problem: Problem) -> None:
    """Checks that numbers of sequences, heads and tokens are within the limits of kernels."""
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
    if q.dtype is torch.float32:
        return Dtype.TF32 if allows_tf32() else Dtype.FP32
    return Dtype.FP32 if q.dtype is torch.float64 else DTYPES[q.dtype]


def allows_tf32() -> bool:
    """Whether torch's settings allow tf32 in matrix products of float32 on a GPU."""
    allowed: str = fp32_precision("cuda", "matmul")
    return allowed == "tf32"


def check_double(q: Tensor, generated: bool) -> None:
    """Rejects float64 if only generated kernels may serve."""
    if q.dtype is torch.float64 and generated:
        raise ProblemError(
            "q is torch.float64: no kernel takes it, pass bfloat16, float16, float32 or float8_e4m3fn, or "
            "prefer='fastest' to use the unfused computation"
        )
