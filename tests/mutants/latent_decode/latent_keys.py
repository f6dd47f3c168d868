"""Mutants of MLA Hopper kernels with wrong masks or probabilities."""

from tests.mutants.core import Mutant, mutants_of
from tests.mutants.latent_decode.latent import FULL, HALF_PRECISION, PARTS, SECOND_GROUP, WHOLE

TAIL = "limits = seqlen_kv - (end - 1) * BLOCK_N"
BLOCK_MAX = "block_max = gl.max(scores, 1) * scale_log2"
EXPONENTIALS = "exponentials = gl.exp2(scores * scale_log2 - shift[:, None])"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the tail and at the diagonal, and which are left out."""
    shift = 'shift = gl.where(row_max == float("-inf"), 0.0, row_max)'
    lost = "exponentials = gl.where(lost, 0.0, exponentials)"
    some_rows = "((gl.arange(0, ROWS, SCORE_ROWS) & 7) == 5)[:, None]"
    last_key = "gl.minimum(position + POSITIONS, tiling.seqlen_q) + diagonal"
    return (
        *mutants_of(FULL, (
            ("tail unmasked", "if end > open_blocks:", "if end > open_blocks + 1:"),
            ("tail one key too long", TAIL, TAIL.replace("seqlen_kv", "seqlen_kv + 1")),
            ("tail one key too short", TAIL, TAIL.replace("seqlen_kv", "seqlen_kv - 1")),
            ("last block skipped", "(seqlen_kv + BLOCK_N - 1) // BLOCK_N", "seqlen_kv // BLOCK_N"),
        )),
        *mutants_of(WHOLE, (
            ("diagonal one key too far", "(diagonal + 1)", "(diagonal + 2)"),
            ("diagonal one key too short", "(diagonal + 1)", "diagonal"),
            ("diagonal aligned to the other corner",
             "diagonal = seqlen_kv - tiling.seqlen_q", "diagonal = 0"),
            ("later blocks' masks missing", "if block >= open_blocks:", "if block >= end:"),
            ("open blocks of a tile's last query",
             "gl.minimum(position + diagonal + 1,", "gl.minimum(position + POSITIONS + diagonal,"),
            ("heads masked as queries",
             "gl.arange(0, ROWS, SCORE_ROWS) % POSITIONS\n#", "gl.arange(0, ROWS, SCORE_ROWS) // HEADS\n#"),
            ("odd columns masked as even ones", "(key_offsets & -7)", "(key_offsets & -8)", None, 2),
            ("blocks behind the diagonal's last skipped", last_key, f"{last_key} - 1"),
            ("empty rows shifted by -inf", shift, "shift = row_max", None, 2),
            ("empty rows divided by zero", "1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)", "1.0 / row_sum"),
            ("first keys forgotten in some rows",
             BLOCK_MAX,
             f'if block == 0:\n    scores = gl.where({some_rows}, float("-inf"), scores)\n{BLOCK_MAX}'),
            ("one key in some rows forgotten",
             EXPONENTIALS,
             f"{EXPONENTIALS}\nlost = {some_rows} & (key_offsets == 5)[None, :]\n{lost}", None, 2),
        )),
        *mutants_of(PARTS, (
            # A part without blocks counts the first one again.
            ("keys of an empty part", "seqlen_kv = gl.where(is_empty, 0, seqlen_kv)", "pass"),
        )),
    )  # fmt: skip


def softmax() -> tuple[Mutant, ...]:
    """Mutants of maxima, of sums, and of the rescaling by each group."""
    row_lse = "row_lse = row_max + gl.log2(row_sum)"
    return (
        *mutants_of(WHOLE, (
            ("left half: rescaling left out",
             "accumulator * gl.convert_layout(rescale, OUTPUT_ROWS)[:, None]", "accumulator * 1.0"),
            ("right half: rescaling left out",
             "accumulator = accumulator * rescale[:, None]", "pass", SECOND_GROUP),
            ("right half: rescaling late by a block",
             "exchange.factors.index(slot).load", "exchange.factors.index(1 - slot).load"),
            ("right half: weights of the block before",
             "warpgroup_mma(exchange.tiles.index(slot)", "warpgroup_mma(exchange.tiles.index(1 - slot)"),
            ("right half: last block left out",
             "for step in range(end - begin):", "for step in range(end - begin - 1):", SECOND_GROUP),
            ("sum not rescaled", "running_sum * sum_rescale[:, None] + block_sum", "running_sum + block_sum"),
            ("sum of the last block alone",
             "gl.sum(running_sum, 1), SCORE_ROWS", "gl.sum(block_sum, 1), SCORE_ROWS"),
            ("maximum not kept", "new_max = gl.where(grows, block_max, row_max)", "new_max = block_max"),
            ("slack without bounds", "SLACK = gl.constexpr(8.0)", "SLACK = gl.constexpr(1e9)"),
            ("second row of a thread has no vote", "or.pred any, any, one; ", ""),
            ("first row of a thread has no vote", "setp.ne.s32 any, $2, 0;", "setp.ne.s32 any, $3, 0;"),
            ("a vote must be unanimous", "vote.sync.any.pred", "vote.sync.all.pred"),
            ("scale applied twice", "scale_log2 = scale *", "scale_log2 = scale * scale *"),
            ("natural exponentials", "scale_log2 = scale * LOG2_E", "scale_log2 = scale"),
            ("lse in base 2", "row_lse * LN_2", "row_lse"),
            ("lse without the maximum", row_lse, "row_lse = gl.log2(row_sum)"),
            ("lse of the maximum alone", row_lse, "row_lse = row_max"),
        )),
        *mutants_of(HALF_PRECISION, (
            # Weights outgrow fp16 before a maximum is followed.
            ("slack beyond fp16", "SLACK = gl.constexpr(8.0)", "SLACK = gl.constexpr(24.0)"),
        )),
    )  # fmt: skip
