"""Tensors in e4m3 (8-bit floats) and their scales.

There is one float32 scale for each sequence and head. The value of a tensor is its elements times their
scale.
"""

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_TOKENS, kind_of, read_scale, shown
from flashtune.core.constant_tensors import constants
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.layouts import WIDE_FLOATS
from flashtune.core.problem import Problem
from flashtune.request.tensor_checks import require_dense

E4M3 = torch.float8_e4m3fn
# The largest number of the type.
LARGEST = 448.0
SIGN_BIT = 0x80


def given_scales(
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> ExtraInputs:
    """Returns the scales of a call; without scales `NO_EXTRA_INPUTS` itself, for a check by identity."""
    if q_scale is k_scale is v_scale is None:
        return NO_EXTRA_INPUTS
    return ExtraInputs(q_scale, k_scale, v_scale)


def quantize(tensor: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Returns a tensor in e4m3 and its scales. The largest magnitude of each head becomes 448.

    Args:
        tensor: [batch, heads, seqlen, head_dim] of any floating type ("bshd": [batch, seqlen, heads,
            head_dim]), with finite elements.
        layout: The order of the dimensions.

    Returns:
        The elements divided by their head's scale, rounded to `torch.float8_e4m3fn`, contiguous and in the
        shape of `tensor`; and the scales, float32 [batch, heads], 1 for heads of zeros.

    Raises:
        ProblemError: The layout is unknown, or the tensor does not have four dimensions.
    """
    require_dense("the tensor to quantise", tensor)
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ProblemError(f"layout cannot be {shown(layout)}: pass 'bhsd' or 'bshd'")
    if tensor.dim() != 4 or tensor.dtype not in WIDE_FLOATS:
        kind = f"{tensor.dim()} dimensions of {tensor.dtype}"
        raise ProblemError(
            f"the tensor to quantise has {kind}: pass four of a floating type of 16 to 64 bits"
        )
    if max(tensor.shape) > MAX_TOKENS:
        raise ProblemError(f"the tensor to quantise is {list(tensor.shape)}: kernels take fewer tokens")
    rows = (2, 3) if layout == "bhsd" else (1, 3)
    if tensor.numel():
        largest = tensor.abs().amax(rows, keepdim=True).float()
    else:
        largest = tensor.new_zeros([1 if axis in rows else size for axis, size in enumerate(tensor.shape)])
    scale = (largest.float() / LARGEST).masked_fill_(largest == 0, 1.0)
    # A quotient may round to just above the largest number, which becomes NaN in some versions of torch.
    elements = (tensor.float() / scale).clamp_(-LARGEST, LARGEST).to(E4M3).contiguous()
    return elements, scale.squeeze(rows)


def negated(tensor: Tensor) -> Tensor:
    """Returns the negated tensor. Torch itself cannot negate 8-bit floats."""
    if tensor.dtype is not E4M3:
        return -tensor
    return (tensor.view(torch.uint8) ^ SIGN_BIT).view(E4M3)


def with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Returns queries and a scale of the same product, with a scale that is not negative."""
    factor = read_scale(scale)
    return (negated(q), -factor) if factor is not None and factor < 0.0 else (q, factor)


def check_scales(problem: Problem, device: torch.device, scales: ExtraInputs) -> None:
    """Checks that scales match a problem. Their values are not checked."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads)
    names = ("q_scale", "k_scale", "v_scale")
    for name, scale, count in zip(names, scales.scales, heads, strict=True):
        if scale is None:
            continue
        if not problem.dtype.is_quantized:
            raise ProblemError(
                f"{name} is given and the inputs are {problem.dtype}: scales belong to float8_e4m3fn inputs, "
                "leave it out"
            )
        if not isinstance(scale, Tensor):
            raise ProblemError(f"{name} is {kind_of(scale)}: pass a float32 tensor, or None for 1")
        require_dense(name, scale)
        if scale.dtype is not torch.float32 or scale.shape != (problem.batch, count):
            raise ProblemError(
                f"{name} is {scale.dtype} of shape {list(scale.shape)}: pass float32 of shape "
                f"[{problem.batch}, {count}], a scale for each sequence and head"
            )
        if scale.device != device:
            raise ProblemError(f"{name} is on {scale.device} and q on {device}: move it there")


def unit_scales(q: Tensor) -> Tensor:
    """Returns ones as the scales of a call without scales: at least one for each head."""
    count = 1 << (q.shape[0] * q.shape[1] - 1).bit_length()
    return constants((1.0,), count, torch.float32, q.device)[0]
