"""Mutants of Hopper backward kernels with wrong or missing pairs of a query and a key."""

from __future__ import annotations

from tests.mutants.backward_hopper.backward_hopper import (
    CAUSAL,
    FULL,
    NARROW_HALVES,
    TOP_LEFT,
    WEIGHTS,
    WIDE,
    WIDE_FULL,
)
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import only

LIMITS = "diagonal - first_key + queries + 1, seqlen_kv - first_key)"
TAIL = "weights = gl.where((keys < seqlen_kv - first_key)[:, None], weights, 0.0)"
WHOLE = "open_from = gl.where(first_key + ROWS > seqlen_kv, end, 0)"
END = "end = (seqlen_q + BLOCK_M - 1) // BLOCK_M"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the diagonal and at the tail."""
    begin = "gl.maximum(block * (2 * ROWS) - diagonal, 0) // BLOCK_M"
    crossing = "gl.maximum(first_key + ROWS - 1 - diagonal, 0) + BLOCK_M - 1"
    return mutants_of((
        ("diagonal off", "No block is masked.", CAUSAL, only("if m_block < open_from:", "if m_block < 0:")),
        ("diagonal one key too far", "Every query sees the key after its last one.", CAUSAL,
         only(LIMITS, LIMITS.replace("+ 1", "+ 2"))),
        ("diagonal one key too short", "No query sees its last key.", CAUSAL,
         only(LIMITS, LIMITS.replace(" + 1", ""))),
        ("diagonal aligned to the other corner",
         "The mask starts at the first key and not at the last.",
         CAUSAL, only("diagonal = seqlen_kv - seqlen_q", "diagonal = 0")),
        ("mask of the first group's keys", "Both groups mask as if they held a program's first keys.", CAUSAL,
         only(LIMITS, LIMITS.replace("first_key + q", "block * (2 * ROWS) + q"))),
        ("open blocks one too many",
         "A block that only some queries see whole is taken without a mask.", CAUSAL,
         only(crossing, crossing.removesuffix(" + BLOCK_M - 1"))),
        ("open blocks of a group's first key", "A block counts as open once its queries see the first key.",
         CAUSAL, only(crossing, crossing.replace(" + ROWS - 1", ""))),
        ("queries of the diagonal's block skipped",
         "Keys do not meet the queries that see them first.", CAUSAL,
         only(begin, f"({begin.removesuffix(' // BLOCK_M')} + BLOCK_M - 1) // BLOCK_M", times=2)),
        ("tail behind the diagonal unmasked", "Queries behind the last key see padding.", TOP_LEFT,
         only(LIMITS, LIMITS.replace("seqlen_kv - first_key", "ROWS"))),
        ("tail of keys unmasked", "A weight of padding overflows where scores are far below zero.", FULL,
         only(TAIL, "pass")),
        ("tail one key too long", "One key of padding counts.", FULL, only(TAIL, TAIL.replace("<", "<="))),
        ("tail one key too short", "The last key counts for nothing.", FULL,
         only(TAIL, TAIL.replace("first_key)", "first_key - 1)"))),
        ("last block of keys open", "The last keys are taken without a mask, whole or not.", FULL,
         only(WHOLE, WHOLE.replace("end, 0", "0, 0"))),
        ("queries' halves: last block of keys open", "So with tiles of 64 columns.", NARROW_HALVES,
         only(WHOLE, WHOLE.replace("> seqlen_kv", "> seqlen_kv + 1"))),
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
         only(END, "end = gl.maximum(seqlen_q // BLOCK_M, 1)", times=2)),
        ("a block forgotten in one group", "Queries of the second block have no weight with some keys.", FULL,
         only(WEIGHTS, f"{WEIGHTS} * gl.where((m_block == 1) & (GROUP == 1), 0.0, 1.0)")),
        ("keys forgotten in some rows",
         "One query in eight gives the keys of its diagonal's block no weight.", CAUSAL,
         only(WEIGHTS, f"{WEIGHTS}\nif m_block == start:\n    weights = gl.where({some}, 0.0, weights)")),
        ("one key in some rows forgotten", "One query in eight does not see the sixth of 64 keys.", CAUSAL,
         only(WEIGHTS, f"{WEIGHTS}\nweights = gl.where((keys == 5)[:, None] & {some}, 0.0, weights)")),
        ("last step left out of dv", "Values have no gradient of a program's last block of queries.", FULL,
         only("low_weights = weights.to(gl.bfloat16)",
              "low_weights = (weights * gl.where(step + 1 < steps, 1.0, 0.0)).to(gl.bfloat16)")),
        ("dk of the first head alone", "Of a group's query heads one counts for dk.", CAUSAL,
         only("dk = warpgroup_mma(gl.convert_layout(ds, WEIGHTS), q_tile, dk, is_async=True)",
              "first_ds = (ds * gl.where(step < end - start, 1.0, 0.0)).to(gl.bfloat16)\n"
              "dk = warpgroup_mma(gl.convert_layout(first_ds, WEIGHTS), q_tile, dk, is_async=True)")),
    ))  # fmt: skip
