"""Mutants of Hopper backward kernels with wrong or missing pairs of a query and a key."""

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

LIMITS = "self.diagonal - n_start + queries + 1, self.seqlen_kv - n_start)"
TAIL = "p = gl.where((keys < self.seqlen_kv - n_start)[:, None], p, 0.0)"
WHOLE = "full_min = gl.where(n_start + ROWS > self.seqlen_kv, m_max, 0)"
END = "m_max = (self.seqlen_q + BLOCK_M - 1) // BLOCK_M"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the diagonal and at the tail."""
    begin = "gl.maximum(n_start - self.diagonal, 0) // BLOCK_M"
    crossing = "gl.maximum(n_start + ROWS - 1 - self.diagonal, 0) + BLOCK_M - 1"
    return (
        *mutants_of(CAUSAL, (
            ("diagonal off", "if m_block < full_min:", "if m_block < 0:"),
            ("diagonal one key too far", LIMITS, LIMITS.replace("+ 1", "+ 2")),
            ("diagonal one key too short", LIMITS, LIMITS.replace(" + 1", "")),
            ("diagonal aligned to the other corner", "diagonal = seqlen_kv - seqlen_q", "diagonal = 0"),
            ("mask of the first group's keys",
             LIMITS, LIMITS.replace("n_start + q", "n_start // (2 * ROWS) * (2 * ROWS) + q")),
            ("open blocks one too many", crossing, crossing.removesuffix(" + BLOCK_M - 1")),
            ("open blocks of a group's first key", crossing, crossing.replace(" + ROWS - 1", "")),
            ("queries of the diagonal's block skipped",
             begin, f"({begin.removesuffix(' // BLOCK_M')} + BLOCK_M - 1) // BLOCK_M"),
        )),
        *mutants_of(TOP_LEFT, (
            ("tail behind the diagonal unmasked", LIMITS, LIMITS.replace("self.seqlen_kv - n_start", "ROWS")),
        )),
        *mutants_of(FULL, (
            # A weight of padding overflows where scores are far below zero.
            ("tail of keys unmasked", TAIL, "pass"),
            ("tail one key too long", TAIL, TAIL.replace("<", "<=")),
            ("tail one key too short", TAIL, TAIL.replace("n_start)", "n_start - 1)")),
            ("last block of keys open", WHOLE, WHOLE.replace("m_max, 0", "0, 0")),
        )),
        *mutants_of(NARROW_HALVES, (
            ("queries' halves: last block of keys open",
             WHOLE, WHOLE.replace("> self.seqlen_kv", "> self.seqlen_kv + 1")),
        )),
        *mutants_of(WIDE, (
            ("divided: diagonal one key too far", LIMITS, LIMITS.replace("+ 1", "+ 2")),
        )),
        *mutants_of(WIDE_FULL, (
            ("divided: tail of keys unmasked", TAIL, "pass"),
        )),
    )  # fmt: skip


def forgotten() -> tuple[Mutant, ...]:
    """Mutants that leave out blocks or terms, or count them twice."""
    of_dk = "dk = warpgroup_mma(gl.convert_layout(ds, P_OPERAND), q_tile, dk, is_async=True)"
    first_ds = "first_ds = (ds * gl.where(step < m_max - m_min, 1.0, 0.0)).to(DTYPE)"
    some = "((queries & 7) == 5)[None, :]"
    return (
        *mutants_of(FULL, (
            ("last block of queries skipped", END, "m_max = gl.maximum(self.seqlen_q // BLOCK_M, 1)"),
            ("a block forgotten in one group",
             PROBABILITIES, f"{PROBABILITIES} * gl.where((m_block == 1) & (GROUP == 1), 0.0, 1.0)"),
            ("last step left out of dv",
             "p_low = p.to(DTYPE)", "p_low = (p * gl.where(step + 1 < steps, 1.0, 0.0)).to(DTYPE)"),
        )),
        *mutants_of(CAUSAL, (
            ("keys forgotten in some rows",
             PROBABILITIES, f"{PROBABILITIES}\nif m_block == m_min:\n    p = gl.where({some}, 0.0, p)"),
            ("one key in some rows forgotten",
             PROBABILITIES, f"{PROBABILITIES}\np = gl.where((keys == 5)[:, None] & {some}, 0.0, p)"),
            ("dk of the first head alone",
             of_dk, f"{first_ds}\n{of_dk.replace('(ds,', '(first_ds,')}"),
        )),
    )  # fmt: skip
