"""Mutants of Hopper kernels with wrong masks."""

from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import CAUSAL, EAGER, FULL, LATER_BLOCKS

ODD_COLUMNS = "(n_offsets & -7)[None, :] < limits"
EXPONENTIALS = "block_sum, p = exponentiate(s, row_max, s_scale_log2)"
TO_WEIGHTS = "p = gl.convert_layout(p.to(ELEMENT), P_LAYOUT)"
OPEN = "full_max = gl.maximum(gl.minimum(m_start + diagonal + RIGHT + 1, this.seqlen_kv), 0) // BLOCK_N"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the tail and at the diagonal."""
    last = "n_end = gl.minimum(positions + diagonal + RIGHT + 1, this.seqlen_kv)"
    return (
        *mutants_of(FULL, (
            ("tail unmasked", "if this.seqlen_kv % BLOCK_N != 0:", "if this.seqlen_kv < 0:"),
            ("tail one key too long",
             "mask_from(s, this.seqlen_kv, n_last", "mask_from(s, this.seqlen_kv + 1, n_last"),
            ("tail one key too short",
             "mask_from(s, this.seqlen_kv, n_last", "mask_from(s, this.seqlen_kv - 1, n_last"),
        )),
        *mutants_of(CAUSAL, (
            ("diagonal one key too far",
             last, "n_end = gl.minimum(positions + diagonal + 2, this.seqlen_kv)"),
            ("diagonal one key too short", last, "n_end = gl.minimum(positions + diagonal, this.seqlen_kv)"),
            ("diagonal aligned to the other corner",
             "diagonal = this.seqlen_kv - this.seqlen_q", "diagonal = 0"),
            # The last block of keys, which comes first, is taken without a mask.
            ("first block's mask missing", "if n_last >= full_max:", "if n_last < 0:"),
            ("later blocks' masks missing", "if n_block >= full_max:", "if n_block < 0:"),
            ("open blocks one too many", OPEN, f"{OPEN} + 1"),
            # A block counts as open when the last row sees it whole, where the first must.
            ("open blocks of the group's last row",
             "gl.minimum(m_start + diagonal + RIGHT + 1, this.seqlen_kv)",
             "gl.minimum(m_start + GROUP_POSITIONS + diagonal, this.seqlen_kv)"),
            ("odd columns masked as even ones", ODD_COLUMNS, "(n_offsets & -8)[None, :] < limits"),
            ("mask of the first group's rows",
             "positions = m_start + row_offsets",
             "positions = m_start - GROUP * GROUP_POSITIONS + row_offsets"),
            ("empty rows shifted by -inf", "shift = finite(row_max)", "shift = row_max"),
            ("empty rows divided by zero", "gl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum"),
        )),
    )  # fmt: skip


def forgotten() -> tuple[Mutant, ...]:
    """Weights that are missing, or another block's."""

    def forget(which: str) -> tuple[Patch, ...]:
        kept = f"s = gl.where({which}, float('-inf'), s)"
        return (Patch(EXPONENTIALS, f"{kept}\n{EXPONENTIALS}", LATER_BLOCKS),)

    first = "(n_offsets + n_block * BLOCK_N < BLOCK_N)[None, :]"
    rows = "(positions % 8 == 3)[:, None]"
    columns = "gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))"
    return (
        *mutants_of(CAUSAL, (
            ("first keys forgotten", forget(first)),
            ("a block forgotten in some rows", forget(f"{rows} & {first}")),
            ("a block forgotten in one group",
             forget(f"{first} & (row_offsets + GROUP * GROUP_M >= GROUP_M)[:, None]")),
            ("one key in some rows forgotten", forget(f"{rows} & (n_offsets == 5)[None, :]")),
        )),
        *mutants_of(EAGER, (
            ("weights of the block before",
             (Patch(EXPONENTIALS, EXPONENTIALS.replace("p =", "_ ="), LATER_BLOCKS),
              Patch(TO_WEIGHTS, "pass", LATER_BLOCKS))),
        )),
        *mutants_of(FULL, (
            # One lane in four leaves its columns out of the sum of weights.
            ("last keys of all blocks forgotten in the sum",
             "p.reshape([GROUP_M,",
             f"gl.where(({columns} % 8 < 6)[None, :], p, 0.0).reshape([GROUP_M,"),
            ("sum of one lane for all", "gl.sum(running_sum, 1)", "gl.max(running_sum, 1) * 4.0"),
        )),
    )  # fmt: skip
