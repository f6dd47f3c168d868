"""What dropout makes of weights: the same generator as the kernels', on tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from flashtune.request.dropout import kept_weights
from flashtune.verification.reference.masks import compared_on

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import Side
    from flashtune.core.problem import Problem
    from flashtune.verification.lengths import Lengths
    from flashtune.verification.reference.masks import Rows

# What the state of a row takes, some eighty steps of arithmetic on whole numbers.
COMPARISONS_OF_A_STATE = 64


def factors(
    problem: Problem, lengths: Lengths, side: Side, some: Rows, device: torch.device
) -> Tensor | None:
    """What weights are multiplied by: 0 where they fall, 1 / (1 - dropout) where they stay.

    Args:
        problem: Whether sequences are packed: rows are counted through all of them then.
        lengths: Of each sequence.
        side: The seed and the share that falls.
        some: Which rows these are.
        device: Where they are wanted.

    Returns:
        Float64 [heads, rows, keys], or None where nothing is dropped.
    """
    if side.seed is None or side.dropout is None:
        return None
    number, rows = some.batch * problem.heads + some.head, some.rows
    if problem.packed:
        begins = torch.tensor([0, *itertools.accumulate(lengths.queries)])
        number, rows = some.head, begins[some.batch][:, None] + rows
    where = compared_on(COMPARISONS_OF_A_STATE * len(number) * len(some.rows), device)
    number, rows = number.to(where), rows.to(where)
    stay = kept_weights(side.seed, number, rows, problem.seqlen_kv, side.dropout, device)
    return stay.double().div_(1.0 - side.dropout)
