"""Memory of a launch in addition to its inputs and outputs."""

from __future__ import annotations

import math

import torch

from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.launch.backward import NUMBERS
from flashtune.launch.compilation import load_module
from flashtune.tuner.execution.inputs import make_inputs

FLOAT32_BYTES = 4


def workspace_bytes(kernel: Kernel, problem: Problem) -> int:
    """Returns the bytes of a backward kernel's workspaces, for contiguous tensors of a problem."""
    given = make_inputs(problem, torch.device("meta"))
    q, k, v, out, side = given.q, given.k, given.v, given.out, given.side
    beside = (getattr(side, name) for name in kernel.all_side if name not in NUMBERS)
    workspaces: tuple[tuple[int, ...], ...]
    _, workspaces, _ = load_module(kernel).launch_plan(q, k, v, out, out, q, k, v, *beside)
    return FLOAT32_BYTES * sum(math.prod(shape) for shape in workspaces)
