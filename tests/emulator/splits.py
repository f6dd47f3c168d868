"""Partial results of kernels that split keys, and their combination."""

import math
from typing import Any

import numpy as np
import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from tests.emulator.hardware import Array

# Outputs and log-sum-exps of splits.
PARTIALS = 2
MAX_PROGRAMS = 16


def empty_parts(kernel: Kernel, tensors: tuple[Any, ...], side: ExtraInputs) -> tuple[Array, ...]:
    """Returns the workspaces of a kernel that splits or folds keys, filled with NaN; none for others."""
    folds = any(argument.name == "folded" for argument in kernel.arguments)
    if kernel.epilogue is None and not folds:
        return ()
    shapes = load_module(kernel).launch_plan(*tensors, *side.tensors)[1]
    if folds:
        # Tests run other numbers of programs than the launch plan.
        shapes = ((MAX_PROGRAMS, shapes[0][1]),)
    return tuple(np.full(shape, math.nan) for shape in shapes)


def combined(parts: Array, logs: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines parts [splits, rows, columns] by their log-sum-exps in log2, as the epilogue does."""
    values, exponents = torch.from_numpy(parts), torch.from_numpy(logs) * math.log(2)
    lse = torch.logsumexp(exponents, 0)
    weights = torch.exp(exponents - lse)
    weights[torch.isneginf(exponents)] = 0.0
    unseen = torch.isneginf(exponents)[..., None]
    return (weights[..., None] * values.masked_fill(unseen, 0.0)).sum(0), lse


def _hide_unwritten(parts: Array, logs: Array) -> None:
    """Hides splits that a kernel skips, as those beyond the last key of a sequence."""
    unwritten = np.isnan(logs)
    assert not unwritten[0].any()
    logs[unwritten] = -math.inf
    parts[unwritten] = 0.0


def put_together(parts: tuple[Array, ...], out: torch.Tensor, lse: torch.Tensor, side: ExtraInputs) -> None:
    """Writes combined parts to `out` and `lse`, except for rows after the last packed sequence."""
    if len(parts) < PARTIALS:
        return
    starts = side.cu_seqlens_q
    end = out.shape[2] if starts is None else int(starts[-1])
    if side.seqlens_kv is not None and starts is None:
        _hide_unwritten(*parts)
    of_parts = combined(*parts)
    assert not end or not any(
        np.isnan(part.reshape(part.shape[0], *lse.shape, -1)[..., :end, :]).any() for part in parts
    )
    for whole, made in zip((out, lse), of_parts, strict=True):
        whole[:, :, :end] = made.view(whole.shape)[:, :, :end]
