"""What comes back to a backward pass: the gradients of the output and of the log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.proof.chance import aside
from flashtune.proof.probes import NEEDLE, Probe, replaced

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.problem import Problem

NEEDLES = (Probe.NEEDLE, Probe.FIRST, Probe.LAST)
# Rows between needles, over the others.
CALM = 0.1


def make_dout(probe: Probe, problem: Problem, block: int, generator: torch.Generator) -> Tensor:
    """A fresh gradient of the output, [batch, heads, seqlen_q, value_head_dim] in float32.

    Where values hold needles so does this, one hot row for each block of queries: a block of them that is
    skipped, masked or taken twice is missing or doubled in a column of dv, and in dk.

    Args:
        probe: What q, k and v hold.
        problem: Shape.
        block: Rows of a tile.
        generator: Source of randomness; its device is where the values are made.
    """
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.value_head_dim)
    normal = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return _with_needles(normal, probe, block, aside(generator, 2)) if probe in NEEDLES else normal


def make_dlse(problem: Problem, generator: torch.Generator) -> Tensor:
    """A fresh gradient of the log-sum-exp, float32 [batch, heads, seqlen_q]."""
    shape = (problem.batch, problem.heads, problem.seqlen_q)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _with_needles(normal: Tensor, probe: Probe, block: int, generator: torch.Generator) -> Tensor:
    batch, heads, rows, width = normal.shape
    blocks = -(-rows // block)
    if probe is Probe.FIRST:
        offset = torch.zeros(batch, heads, blocks, dtype=torch.int64)
    elif probe is Probe.LAST:
        offset = torch.full((batch, heads, blocks), block - 1)
    else:
        offset = torch.randint(block, (batch, heads, blocks), generator=generator)
    row = (torch.arange(blocks) * block + offset).clamp_max(rows - 1)
    # Neighbouring blocks and heads that share keys use columns apart.
    column = (torch.arange(blocks) * 5 + torch.arange(heads)[:, None] * 3) % width
    sign = torch.randint(2, (batch, heads, blocks), generator=generator) * 2.0 - 1.0
    some_batch, some_head = torch.arange(batch)[:, None, None], torch.arange(heads)[None, :, None]
    return replaced(CALM * normal, (some_batch, some_head, row, column), NEEDLE * sign)
