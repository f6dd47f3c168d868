"""Compares outputs with the float64 reference, for any memory layout of the inputs."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Problem
from flashtune.tuner.bench.admission import Judge
from flashtune.tuner.execution.inputs import Tensors
from flashtune.verification.inputs.placement import (
    Places,
    excused,
    key_places,
    missing,
    pick,
    query_places,
)
from flashtune.verification.lengths import Lengths, usual_lengths
from flashtune.verification.reference.forward import Expected, Sample, expect, sample
from flashtune.verification.tolerance import worst_ratio

SEED = 0


class SequenceLayout(NamedTuple):
    """The positions of a problem's sequences in memory."""

    problem: Problem  # The problem.
    lengths: Lengths  # Lengths of its sequences.
    query_places: Places | None  # Positions of queries, None if tensors are padded already.
    key_places: Places | None  # Positions of keys, likewise.

    @staticmethod
    def of(problem: Problem, tensors: Tensors) -> SequenceLayout:
        """Returns the layout of tensors that `make_tensors` made."""
        lengths = usual_lengths(problem)
        if not (problem.packed or problem.page_size):
            return SequenceLayout(problem, lengths, None, None)
        table = tensors.side.block_table
        entries = None if table is None else table.cpu()
        places = query_places(problem, lengths), key_places(problem, lengths, entries)
        return SequenceLayout(problem, lengths, *places)

    def queries(self, memory: Tensor) -> Tensor:
        """Returns rows of queries with zeros after each sequence, [batch, heads, seqlen_q, width]."""
        return self._padded(memory, self.query_places, self.problem.seqlen_q)

    def keys(self, memory: Tensor) -> Tensor:
        """Returns rows of keys with zeros after each sequence, [batch, kv_heads, seqlen_kv, width]."""
        return self._padded(memory, self.key_places, self.problem.seqlen_kv)

    def padded(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, ExtraInputs]:
        """Returns padded q, k and v, and the extra inputs with a scale for each key of a cache in pages."""
        side = tensors.side
        if self.problem.page_size:
            side = side._replace(k_scale=self._of_keys(side.k_scale), v_scale=self._of_keys(side.v_scale))
        return self.queries(tensors.q), self.keys(tensors.k), self.keys(tensors.v), side

    def _of_keys(self, scale: Tensor | None) -> Tensor | None:
        """Returns the scale of each key, [batch, kv_heads, seqlen_kv], of [pages, kv_heads]."""
        if scale is None:
            return None
        of_slots = scale[:, :, None, None].expand(-1, -1, self.problem.page_size, 1)
        return self.keys(of_slots)[..., 0]

    def _padded(self, memory: Tensor, places: Places | None, rows: int) -> Tensor:
        """Returns rows of sequences, [batch, heads, rows, width], of [blocks, heads, slots, width]."""
        if places is None:
            return memory
        there = places.to(memory.device)
        dense = memory.new_zeros(self.problem.batch, rows, memory.shape[1], memory.shape[3])
        # Torch cannot index 8-bit floats.
        bits = torch.uint8 if memory.element_size() == 1 else memory.dtype
        source = memory.transpose(1, 2).view(bits)
        dense.view(bits)[there.sequence, there.row] = source[there.block, there.slot]
        return dense.transpose(1, 2)


class Compared(NamedTuple):
    """The rows that are compared, the same for all contestants."""

    layout: SequenceLayout  # The positions of outputs in memory.
    chosen: Sample  # The rows and heads.
    # Their reference. Rows that a packed sequence does not have may be anything.
    expected: Expected


def output_judge(problem: Problem, tensors: Tensors) -> Judge:
    """Returns a function that compares an output with the reference at sampled rows."""
    chosen = sample(problem, torch.Generator(tensors.q.device).manual_seed(SEED))
    layout = SequenceLayout.of(problem, tensors)
    q, k, v, side = layout.padded(tensors)
    expected = expect(problem, q, k, v, tensors.scale, chosen, side, layout.lengths)
    absent = missing(problem, layout.lengths, *chosen)
    expected = expected._replace(allowed=excused(expected.allowed, absent))
    return functools.partial(error_of, compared=Compared(layout, chosen, expected))


def error_of(result: object, compared: Compared) -> float:
    """Returns the largest row error of a result as a multiple of the tolerance, infinite if not finite.

    The result is the output, or a tuple that starts with it. The output is [batch, heads, seqlen_q,
    value_head_dim], or [1, heads, total_q, value_head_dim] of packed sequences.
    """
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    layout, chosen, expected = compared
    rows = pick(out, layout.problem, layout.lengths, *chosen)
    ratio = float(worst_ratio(rows, expected.out, expected.allowed))
    return math.inf if math.isnan(ratio) else ratio
