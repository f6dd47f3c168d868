"""Mutants of Hopper kernels with wrong masks."""

from __future__ import annotations

from tests.mutants.core import Mutant, Patch
from tests.mutants.forward_hopper.hopper import CAUSAL, EAGER, FULL, LATER_BLOCKS, only

ODD_COLUMNS = "(n_offsets & -7)[None, :] < limits"
EXPONENTIALS = "block_sum, p = exponentiate(s, row_max, s_scale_log2)"
TO_WEIGHTS = "p = gl.convert_layout(p.to(ELEMENT), P_LAYOUT)"
OPEN = "full_max = gl.maximum(gl.minimum(m_start + diagonal + RIGHT + 1, this.seqlen_kv), 0) // BLOCK_N"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the tail and at the diagonal."""
    last = "n_end = gl.minimum(positions + diagonal + RIGHT + 1, this.seqlen_kv)"
    return (
        Mutant(
            "tail unmasked",
            "Zeros that the copy engine reads behind the last key take part in the softmax.",
            FULL,
            only("if this.seqlen_kv % BLOCK_N != 0:", "if this.seqlen_kv < 0:"),
        ),
        Mutant(
            "tail one key too long",
            "One key of zeros behind the last takes part in the softmax.",
            FULL,
            only("mask_from(s, this.seqlen_kv, n_last", "mask_from(s, this.seqlen_kv + 1, n_last"),
        ),
        Mutant(
            "tail one key too short",
            "The last key is masked where the last block is not whole.",
            FULL,
            only("mask_from(s, this.seqlen_kv, n_last", "mask_from(s, this.seqlen_kv - 1, n_last"),
        ),
        Mutant(
            "diagonal one key too far",
            "Every query sees the key after its last one.",
            CAUSAL,
            only(last, "n_end = gl.minimum(positions + diagonal + 2, this.seqlen_kv)"),
        ),
        Mutant(
            "diagonal one key too short",
            "No query sees its last key.",
            CAUSAL,
            only(last, "n_end = gl.minimum(positions + diagonal, this.seqlen_kv)"),
        ),
        Mutant(
            "diagonal aligned to the other corner",
            "The mask starts at the first key where it should end at the last.",
            CAUSAL,
            only("diagonal = this.seqlen_kv - this.seqlen_q", "diagonal = 0"),
        ),
        Mutant(
            "first block's mask missing",
            "The last block of keys, which comes first, is taken without a mask.",
            CAUSAL,
            only("if n_last >= full_max:", "if n_last < 0:"),
        ),
        Mutant(
            "later blocks' masks missing",
            "Where the diagonal crosses two blocks only one is masked.",
            CAUSAL,
            only("if n_block >= full_max:", "if n_block < 0:"),
        ),
        Mutant(
            "open blocks one too many",
            "A block that only some rows see whole is taken without a mask.",
            CAUSAL,
            only(OPEN, f"{OPEN} + 1"),
        ),
        Mutant(
            "open blocks of the group's last row",
            "A block counts as open when the last row sees it whole, where the first must.",
            CAUSAL,
            only(
                "gl.minimum(m_start + diagonal + RIGHT + 1, this.seqlen_kv)",
                "gl.minimum(m_start + GROUP_POSITIONS + diagonal, this.seqlen_kv)",
            ),
        ),
        Mutant(
            "odd columns masked as even ones",
            "The mask steps by two keys.",
            CAUSAL,
            only(ODD_COLUMNS, "(n_offsets & -8)[None, :] < limits"),
        ),
        Mutant(
            "mask of the first group's rows",
            "All groups mask as if they held the tile's first rows.",
            CAUSAL,
            only(
                "positions = m_start + row_offsets",
                "positions = m_start - GROUP * GROUP_POSITIONS + row_offsets",
            ),
        ),
        Mutant(
            "empty rows shifted by -inf",
            "A row that has seen no key yet turns NaN.",
            CAUSAL,
            only("shift = finite(row_max)", "shift = row_max"),
        ),
        Mutant(
            "empty rows divided by zero",
            "A row that sees no key is NaN.",
            CAUSAL,
            only("gl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum"),
        ),
    )


def forgotten() -> tuple[Mutant, ...]:
    """Weights that are missing, or another block's."""

    def forget(which: str) -> tuple[Patch, ...]:
        kept = f"s = gl.where({which}, float('-inf'), s)"
        return only(EXPONENTIALS, f"{kept}\n{EXPONENTIALS}", LATER_BLOCKS)

    first = "(n_offsets + n_block * BLOCK_N < BLOCK_N)[None, :]"
    rows = "(positions % 8 == 3)[:, None]"
    return (
        Mutant("first keys forgotten", "The first block of keys has no weight.", CAUSAL, forget(first)),
        Mutant(
            "a block forgotten in some rows",
            "In one row of eight the first block of keys has no weight.",
            CAUSAL,
            forget(f"{rows} & {first}"),
        ),
        Mutant(
            "a block forgotten in one group",
            "The second group gives the first block of keys no weight.",
            CAUSAL,
            forget(f"{first} & (row_offsets + GROUP * GROUP_M >= GROUP_M)[:, None]"),
        ),
        Mutant(
            "one key in some rows forgotten",
            "In one row of eight the sixth key of a block has no weight.",
            CAUSAL,
            forget(f"{rows} & (n_offsets == 5)[None, :]"),
        ),
        Mutant(
            "weights of the block before",
            "Values meet the weights of the block that came before them.",
            EAGER,
            (
                Patch(EXPONENTIALS, EXPONENTIALS.replace("p =", "_ ="), LATER_BLOCKS),
                Patch(TO_WEIGHTS, "pass", LATER_BLOCKS),
            ),
        ),
        Mutant(
            "last keys of all blocks forgotten in the sum",
            "One lane in four leaves its columns out of the sum of weights.",
            FULL,
            only(
                "p.reshape([GROUP_M,",
                "gl.where((gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT)) % 8 < 6)[None, :], p, 0.0)"
                ".reshape([GROUP_M,",
            ),
        ),
        Mutant(
            "sum of one lane for all",
            "The lanes of a row are taken to hold equal sums.",
            FULL,
            only("gl.sum(running_sum, 1)", "gl.max(running_sum, 1) * 4.0"),
        ),
    )
