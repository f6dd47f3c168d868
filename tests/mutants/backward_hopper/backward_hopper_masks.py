"""Mutants of Hopper backward kernels with wrong or missing pairs of a query and a key."""

from __future__ import annotations

from tests.mutants.backward_hopper.backward_hopper import (
    CAUSAL,
    FULL,
    NARROW_HALVES,
    PROBABILITIES,
    TOP_LEFT,
    WIDE,
    WIDE_FULL,
)
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import only

LIMITS = "self.diagonal - n_start + queries + 1, self.seqlen_kv - n_start)"
TAIL = "p = gl.where((keys < self.seqlen_kv - n_start)[:, None], p, 0.0)"
WHOLE = "full_min = gl.where(n_start + ROWS > self.seqlen_kv, m_max, 0)"
END = "m_max = (self.seqlen_q + BLOCK_M - 1) // BLOCK_M"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the diagonal and at the tail."""
    begin = "gl.maximum(n_start - self.diagonal, 0) // BLOCK_M"
    crossing = "gl.maximum(n_start + ROWS - 1 - self.diagonal, 0) + BLOCK_M - 1"
    return mutants_of((
        ("diagonal off", "No block is masked.", CAUSAL, only("if m_block < full_min:", "if m_block < 0:")),
        ("diagonal one key too far", "Every query sees the key after its last one.", CAUSAL,
         only(LIMITS, LIMITS.replace("+ 1", "+ 2"))),
        ("diagonal one key too short", "No query sees its last key.", CAUSAL,
         only(LIMITS, LIMITS.replace(" + 1", ""))),
        ("diagonal aligned to the other corner",
         "The mask starts at the first key and not at the last.",
         CAUSAL, only("diagonal = seqlen_kv - seqlen_q", "diagonal = 0")),
        ("mask of the first group's keys", "Both groups mask as if they held a program's first keys.", CAUSAL,
         only(LIMITS, LIMITS.replace("n_start + q", "n_start // (2 * ROWS) * (2 * ROWS) + q"))),
        ("open blocks one too many",
         "A block that only some queries see whole is taken without a mask.", CAUSAL,
         only(crossing, crossing.removesuffix(" + BLOCK_M - 1"))),
        ("open blocks of a group's first key", "A block counts as open once its queries see the first key.",
         CAUSAL, only(crossing, crossing.replace(" + ROWS - 1", ""))),
        ("queries of the diagonal's block skipped",
         "Keys do not meet the queries that see them first.", CAUSAL,
         only(begin, f"({begin.removesuffix(' // BLOCK_M')} + BLOCK_M - 1) // BLOCK_M")),
        ("tail behind the diagonal unmasked", "Queries behind the last key see padding.", TOP_LEFT,
         only(LIMITS, LIMITS.replace("self.seqlen_kv - n_start", "ROWS"))),
        ("tail of keys unmasked", "A weight of padding overflows where scores are far below zero.", FULL,
         only(TAIL, "pass")),
        ("tail one key too long", "One key of padding counts.", FULL, only(TAIL, TAIL.replace("<", "<="))),
        ("tail one key too short", "The last key counts for nothing.", FULL,
         only(TAIL, TAIL.replace("n_start)", "n_start - 1)"))),
        ("last block of keys open", "The last keys are taken without a mask, whole or not.", FULL,
         only(WHOLE, WHOLE.replace("m_max, 0", "0, 0"))),
        ("queries' halves: last block of keys open", "So with tiles of 64 columns.", NARROW_HALVES,
         only(WHOLE, WHOLE.replace("> self.seqlen_kv", "> self.seqlen_kv + 1"))),
        ("divided: diagonal one key too far",
         "Where groups divide products, queries see a key too many.", WIDE,
         only(LIMITS, LIMITS.replace("+ 1", "+ 2"))),
        ("divided: tail of keys unmasked", "Where groups divide products, padding has weight.", WIDE_FULL,
         only(TAIL, "pass")),
    ))  # fmt: skip


def forgotten() -> tuple[Mutant, ...]:
    """What is left out, or counts twice."""
    some = "((queries & 7) == 5)[None, :]"
    return mutants_of((
        ("last block of queries skipped", "A last block of queries that is not whole is left out.", FULL,
         only(END, "m_max = gl.maximum(self.seqlen_q // BLOCK_M, 1)")),
        ("a block forgotten in one group", "Queries of the second block have no weight with some keys.", FULL,
         only(PROBABILITIES, f"{PROBABILITIES} * gl.where((m_block == 1) & (GROUP == 1), 0.0, 1.0)")),
        ("keys forgotten in some rows",
         "One query in eight gives the keys of its diagonal's block no weight.", CAUSAL,
         only(PROBABILITIES, f"{PROBABILITIES}\nif m_block == m_min:\n    p = gl.where({some}, 0.0, p)")),
        ("one key in some rows forgotten", "One query in eight does not see the sixth of 64 keys.", CAUSAL,
         only(PROBABILITIES, f"{PROBABILITIES}\np = gl.where((keys == 5)[:, None] & {some}, 0.0, p)")),
        ("last step left out of dv", "Values have no gradient of a program's last block of queries.", FULL,
         only("p_low = p.to(DTYPE)",
              "p_low = (p * gl.where(step + 1 < steps, 1.0, 0.0)).to(DTYPE)")),
        ("dk of the first head alone", "Of a group's query heads one counts for dk.", CAUSAL,
         only("dk = warpgroup_mma(gl.convert_layout(ds, P_OPERAND), q_tile, dk, is_async=True)",
              "first_ds = (ds * gl.where(step < m_max - m_min, 1.0, 0.0)).to(DTYPE)\n"
              "dk = warpgroup_mma(gl.convert_layout(first_ds, P_OPERAND), q_tile, dk, is_async=True)")),
    ))  # fmt: skip
