"""Mutants of Hopper kernels with wrong masks."""

from __future__ import annotations

from tests.mutants.core import Mutant, Patch
from tests.mutants.forward_hopper.hopper import CAUSAL, EAGER, FULL, LATER_BLOCKS, only

ODD_COLUMNS = "(key_offsets & -7)[None, :] < limits"
EXPONENTIALS = "exponentials = gl.exp2(scores * scale_log2 - shift[:, None])"
TO_WEIGHTS = "weights = gl.convert_layout(exponentials.to(gl.bfloat16), WEIGHTS)"
OPEN = "open_blocks = gl.maximum(gl.minimum(first + diagonal + 1, seqlen_kv), 0) // BLOCK_N"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the tail and at the diagonal."""
    last = "visible_end = gl.minimum(positions + diagonal + 1, seqlen_kv)"
    return (
        Mutant(
            "tail unmasked",
            "Zeros that the copy engine reads behind the last key take part in the softmax.",
            FULL,
            only("if seqlen_kv % BLOCK_N != 0:", "if seqlen_kv < 0:"),
        ),
        Mutant(
            "tail one key too long",
            "One key of zeros behind the last takes part in the softmax.",
            FULL,
            only("limits = seqlen_kv - block", "limits = seqlen_kv + 1 - block"),
        ),
        Mutant(
            "tail one key too short",
            "The last key is masked where the last block is not whole.",
            FULL,
            only("limits = seqlen_kv - block", "limits = seqlen_kv - 1 - block"),
        ),
        Mutant(
            "diagonal one key too far",
            "Every query sees the key after its last one.",
            CAUSAL,
            only(last, "visible_end = gl.minimum(positions + diagonal + 2, seqlen_kv)"),
        ),
        Mutant(
            "diagonal one key too short",
            "No query sees its last key.",
            CAUSAL,
            only(last, "visible_end = gl.minimum(positions + diagonal, seqlen_kv)"),
        ),
        Mutant(
            "diagonal aligned to the other corner",
            "The mask starts at the first key where it should end at the last.",
            CAUSAL,
            only("diagonal = seqlen_kv - seqlen_q", "diagonal = 0"),
        ),
        Mutant(
            "first block's mask missing",
            "The last block of keys, which comes first, is taken without a mask.",
            CAUSAL,
            only("if block >= open_blocks:", "if block < 0:"),
        ),
        Mutant(
            "later blocks' masks missing",
            "Where the diagonal crosses two blocks only one is masked.",
            CAUSAL,
            only("if earlier >= open_blocks:", "if earlier < 0:"),
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
                "gl.minimum(first + diagonal + 1, seqlen_kv)",
                "gl.minimum(first + POSITIONS + diagonal, seqlen_kv)",
            ),
        ),
        Mutant(
            "odd columns masked as even ones",
            "The mask steps by two keys.",
            CAUSAL,
            only(ODD_COLUMNS, "(key_offsets & -8)[None, :] < limits", times=2),
        ),
        Mutant(
            "mask of the first group's rows",
            "All groups mask as if they held the tile's first rows.",
            CAUSAL,
            only("positions = first + row_offsets", "positions = first - GROUP * POSITIONS + row_offsets"),
        ),
        Mutant(
            "empty rows shifted by -inf",
            "A row that has seen no key yet turns NaN.",
            CAUSAL,
            only('shift = gl.where(row_max == float("-inf"), 0.0, row_max)', "shift = row_max", times=2),
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
        kept = f"exponentials = gl.where({which}, 0.0, exponentials)"
        return only(EXPONENTIALS, f"{EXPONENTIALS}\n{kept}", LATER_BLOCKS)

    first = "(key_offsets + earlier * BLOCK_N < BLOCK_N)[None, :]"
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
            forget(f"{first} & (row_offsets + GROUP * ROWS >= ROWS)[:, None]"),
        ),
        Mutant(
            "one key in some rows forgotten",
            "In one row of eight the sixth key of a block has no weight.",
            CAUSAL,
            forget(f"{rows} & (key_offsets == 5)[None, :]"),
        ),
        Mutant(
            "weights of the block before",
            "Values meet the weights of the block that came before them.",
            EAGER,
            only(TO_WEIGHTS, "pass", LATER_BLOCKS),
        ),
        Mutant(
            "last keys of all blocks forgotten in the sum",
            "One lane in four leaves its columns out of the sum of weights.",
            FULL,
            only(
                "exponentials.reshape([ROWS,",
                "gl.where((key_offsets % 8 < 6)[None, :], exponentials, 0.0).reshape([ROWS,",
                times=2,
            ),
        ),
        Mutant(
            "sum of one lane for all",
            "The lanes of a row are taken to hold equal sums.",
            FULL,
            only("gl.sum(running_sum, 1)", "gl.max(running_sum, 1) * 4.0"),
        ),
    )
