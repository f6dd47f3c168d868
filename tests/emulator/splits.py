"""Partial results of kernels that split keys, and their combination."""

import math
from typing import Any

import numpy as np
import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from tests.emulator.hardware import Array


def empty_parts(kernel: Kernel, tensors: tuple[Any, ...], side: ExtraInputs) -> tuple[Array, ...]:
    """Returns the workspaces of a kernel that splits keys, filled with NaN; none for other kernels."""
    if kernel.epilogue is None:
        return ()
    shapes = load_module(kernel).launch_plan(*tensors, *side.tensors)[1]
    return tuple(np.full(shape, math.nan) for shape in shapes)


def combined(parts: Array, logs: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines parts [splits, rows, columns] by their log-sum-exps in log2, as the epilogue does."""
    values, exponents = torch.from_numpy(parts), torch.from_numpy(logs) * math.log(2)
    lse = torch.logsumexp(exponents, 0)
    weights = torch.exp(exponents - lse)
    weights[torch.isneginf(exponents)] = 0.0
    unseen = torch.isneginf(exponents)[..., None]
    return (weights[..., None] * values.masked_fill(unseen, 0.0)).sum(0), lse


def put_together(parts: tuple[Array, ...], out: torch.Tensor, lse: torch.Tensor, side: ExtraInputs) -> None:
    """Writes combined parts to `out` and `lse`, except for rows after the last packed sequence."""
    if not parts:
        return
    starts = side.cu_seqlens_q
    end = out.shape[2] if starts is None else int(starts[-1])
    of_parts = combined(*parts)
    assert not end or not any(
        np.isnan(part.reshape(part.shape[0], *lse.shape, -1)[..., :end, :]).any() for part in parts
    )
    for whole, made in zip((out, lse), of_parts, strict=True):
        whole[:, :, :end] = made.view(whole.shape)[:, :, :end]
