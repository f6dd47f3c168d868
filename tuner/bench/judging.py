"""Compares outputs with the float64 reference, for any memory layout of the inputs."""

import functools
import math

import torch
from torch import Tensor

from flashtune.core.problem import Problem
from flashtune.tuner.bench.admission import Judge
from flashtune.tuner.execution.inputs import Tensors
from flashtune.verification.inputs.placement import (
    SequenceLayout,
    excused,
    key_places,
    missing,
    pick,
    query_places,
)
from flashtune.verification.lengths import usual_lengths
from flashtune.verification.reference.forward import Expected, Sample, expect, sample
from flashtune.verification.tolerance import worst_ratio

SEED = 0


def sequence_layout(problem: Problem, tensors: Tensors) -> SequenceLayout:
    """Returns the positions of sequences in tensors that `make_tensors` made."""
    lengths = usual_lengths(problem)
    if not (problem.packed or problem.page_size):
        return SequenceLayout(problem, lengths, None, None)
    table = tensors.side.block_table
    entries = None if table is None else table.cpu()
    return SequenceLayout(
        problem, lengths, query_places(problem, lengths), key_places(problem, lengths, entries)
    )


def output_judge(problem: Problem, tensors: Tensors) -> Judge:
    """Returns a function that compares an output with the reference at the same sampled rows."""
    chosen = sample(problem, torch.Generator(tensors.q.device).manual_seed(SEED))
    layout = sequence_layout(problem, tensors)
    q, k, v, side = layout.inputs(tensors.q, tensors.k, tensors.v, tensors.side)
    expected = expect(problem, q, k, v, tensors.scale, chosen, side, layout.lengths)
    absent = missing(problem, layout.lengths, *chosen)
    # Rows that a packed sequence does not have may be anything.
    expected = expected._replace(allowed=excused(expected.allowed, absent))
    return functools.partial(error_of, layout=layout, chosen=chosen, expected=expected)


def error_of(result: object, layout: SequenceLayout, chosen: Sample, expected: Expected) -> float:
    """Returns the largest row error of a result as a multiple of the tolerance, infinite if not finite.

    The result is the output, or a tuple that starts with it. The output is [batch, heads, seqlen_q,
    value_head_dim], or [1, heads, total_q, value_head_dim] of packed sequences.
    """
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    rows = pick(out, layout.problem, layout.lengths, *chosen)
    ratio = float(worst_ratio(rows, expected.out, expected.allowed))
    return math.inf if math.isnan(ratio) else ratio
