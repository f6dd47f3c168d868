"""Mutants of MLA Hopper kernels with wrong masks or probabilities."""

from __future__ import annotations

from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import only
from tests.mutants.latent_decode.latent import FULL, HALF_PRECISION, PARTS, SECOND_GROUP, WHOLE

TAIL = "limits = seqlen_kv - (end - 1) * BLOCK_N"
BLOCK_MAX = "block_max = gl.max(scores, 1) * scale_log2"
EXPONENTIALS = "exponentials = gl.exp2(scores * scale_log2 - shift[:, None])"


def masks() -> tuple[Mutant, ...]:
    """Which keys a query sees, at the tail and at the diagonal, and which are left out."""
    shift = 'shift = gl.where(row_max == float("-inf"), 0.0, row_max)'
    some_rows = "((gl.arange(0, ROWS, SCORE_ROWS) & 7) == 5)[:, None]"
    last_key = "gl.minimum(position + POSITIONS, tiling.seqlen_q) + diagonal"
    return mutants_of((
        ("tail unmasked",
         "Zeros that the copy engine reads behind the last key take part in the softmax.", FULL,
         only("if end > open_blocks:", "if end > open_blocks + 1:")),
        ("tail one key too long", "One key of zeros behind the last takes part in the softmax.", FULL,
         only(TAIL, TAIL.replace("seqlen_kv", "seqlen_kv + 1"))),
        ("tail one key too short", "The last key is masked where the last block is not whole.", FULL,
         only(TAIL, TAIL.replace("seqlen_kv", "seqlen_kv - 1"))),
        ("diagonal one key too far", "Every query but the last sees the key after its last one.", WHOLE,
         only("(diagonal + 1)", "(diagonal + 2)")),
        ("diagonal one key too short",
         "No query sees its last key.", WHOLE, only("(diagonal + 1)", "diagonal")),
        ("diagonal aligned to the other corner",
         "The mask starts at the first key and not at the last.",
         WHOLE, only("diagonal = seqlen_kv - tiling.seqlen_q", "diagonal = 0")),
        ("later blocks' masks missing", "Where the diagonal crosses two blocks only one is masked.", WHOLE,
         only("if block >= open_blocks:", "if block >= end:")),
        ("open blocks of a tile's last query",
         "A block counts as open when the last query sees it whole.", WHOLE,
         only("gl.minimum(position + diagonal + 1,", "gl.minimum(position + POSITIONS + diagonal,")),
        ("heads masked as queries", "Rows of a tile's later heads are masked as its later queries.", WHOLE,
         only("gl.arange(0, ROWS, SCORE_ROWS) % POSITIONS\n#", "gl.arange(0, ROWS, SCORE_ROWS) // HEADS\n#")),
        ("odd columns masked as even ones", "The mask steps by two keys.", WHOLE,
         only("(key_offsets & -7)", "(key_offsets & -8)", times=2)),
        ("blocks behind the diagonal's last skipped",
         "The last key of a tile's last query does not count.", WHOLE,
         only(last_key, f"{last_key} - 1")),
        ("last block skipped", "A last block of keys that is not whole is left out.", FULL,
         only("(seqlen_kv + BLOCK_N - 1) // BLOCK_N", "seqlen_kv // BLOCK_N")),
        ("empty rows shifted by -inf", "A row that has seen no key yet turns NaN.", WHOLE,
         only(shift, "shift = row_max", times=2)),
        ("empty rows divided by zero", "A row that sees no key is NaN.", WHOLE,
         only("1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)", "1.0 / row_sum")),
        ("first keys forgotten in some rows",
         "In one row of eight the first block of keys has no weight.", WHOLE,
         only(BLOCK_MAX,
              f'if block == 0:\n    scores = gl.where({some_rows}, float("-inf"), scores)\n{BLOCK_MAX}')),
        ("one key in some rows forgotten",
         "In one row of eight the sixth key of a block has no weight.", WHOLE,
         only(EXPONENTIALS, f"{EXPONENTIALS}\nlost = {some_rows} & (key_offsets == 5)[None, :]\n"
              "exponentials = gl.where(lost, 0.0, exponentials)", times=2)),
        ("keys of an empty part", "A part without blocks counts the first one again.", PARTS,
         only("seqlen_kv = gl.where(is_empty, 0, seqlen_kv)", "pass")),
    ))  # fmt: skip


def softmax() -> tuple[Mutant, ...]:
    """Maxima, sums, and what is rescaled by whom."""
    row_lse = "row_lse = row_max + gl.log2(row_sum)"
    return mutants_of((
        ("left half: rescaling left out", "It keeps a scale that maxima have left behind.", WHOLE,
         only("accumulator * gl.convert_layout(rescale, OUTPUT_ROWS)[:, None]", "accumulator * 1.0")),
        ("right half: rescaling left out", "It keeps a scale that maxima have left behind.", WHOLE,
         only("accumulator = accumulator * rescale[:, None]", "pass", SECOND_GROUP)),
        ("right half: rescaling late by a block", "It is rescaled by the factor of the block before.", WHOLE,
         only("exchange.factors.index(slot).load", "exchange.factors.index(1 - slot).load")),
        ("right half: weights of the block before", "Values meet the weights of another block.", WHOLE,
         only("warpgroup_mma(exchange.tiles.index(slot)", "warpgroup_mma(exchange.tiles.index(1 - slot)")),
        ("right half: last block left out",
         "The block that comes last has no weight in the right half.", WHOLE,
         only("for step in range(end - begin):", "for step in range(end - begin - 1):", SECOND_GROUP)),
        ("sum not rescaled", "The sum of weights keeps a scale that the maximum has left behind.", WHOLE,
         only("running_sum * sum_rescale[:, None] + block_sum", "running_sum + block_sum")),
        ("sum of the last block alone", "Outputs are divided by the sum of one block's weights.", WHOLE,
         only("gl.sum(running_sum, 1), SCORE_ROWS", "gl.sum(block_sum, 1), SCORE_ROWS")),
        ("maximum not kept", "The running maximum falls where it should rise.", WHOLE,
         only("new_max = gl.where(grows, block_max, row_max)", "new_max = block_max")),
        ("slack without bounds", "No growth of a maximum is ever followed.", WHOLE,
         only("SLACK = gl.constexpr(8.0)", "SLACK = gl.constexpr(1e9)")),
        ("slack beyond fp16", "Weights outgrow fp16 before a maximum is followed.", HALF_PRECISION,
         only("SLACK = gl.constexpr(8.0)", "SLACK = gl.constexpr(24.0)")),
        ("second row of a thread has no vote",
         "A warp is rescaled when some first row of a thread has grown.",
         WHOLE, only("or.pred any, any, one; ", "")),
        ("first row of a thread has no vote",
         "A warp is rescaled when some second row of a thread has grown.",
         WHOLE, only("setp.ne.s32 any, $2, 0;", "setp.ne.s32 any, $3, 0;")),
        ("a vote must be unanimous", "A warp is rescaled when all of its lanes have grown.", WHOLE,
         only("vote.sync.any.pred", "vote.sync.all.pred")),
        ("scale applied twice", "Scores are scaled by the square of the scale.", WHOLE,
         only("scale_log2 = scale *", "scale_log2 = scale * scale *")),
        ("natural exponentials", "Powers of two are taken of scores in natural units.", WHOLE,
         only("scale_log2 = scale * LOG2_E", "scale_log2 = scale")),
        ("lse in base 2", "The log-sum-exp is in units of log2.", WHOLE, only("row_lse * LN_2", "row_lse")),
        ("lse without the maximum", "The log-sum-exp lacks the maximum of the scores.", WHOLE,
         only(row_lse, "row_lse = gl.log2(row_sum)")),
        ("lse of the maximum alone",
         "The log-sum-exp lacks the sum.", WHOLE, only(row_lse, "row_lse = row_max")),
    ))  # fmt: skip
