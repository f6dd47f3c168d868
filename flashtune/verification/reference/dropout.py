"""Reference of dropout, with the same random number generator as the kernels."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from flashtune.request.dropout import kept_weights
from flashtune.verification.reference.masks import compared_on

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import ExtraInputs
    from flashtune.core.problem import Problem
    from flashtune.verification.lengths import Lengths
    from flashtune.verification.reference.masks import Rows

# The cost of a row's generator state, about eighty integer operations, in comparisons.
COMPARISONS_OF_A_STATE = 64


def factors(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> Tensor | None:
    """Returns the factors of the probabilities: 0 if dropped, otherwise 1 / (1 - dropout).

    Args:
        problem: Whether it is varlen. If so, rows are numbered through the batch.
        lengths: Lengths of the sequences.
        side: The seed and the dropout probability.
        some: The rows.
        device: Device of the result.

    Returns:
        Float64 [heads, rows, keys], or None without dropout.
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
