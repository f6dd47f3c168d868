"""Mutants of Hopper kernels whose maxima, sums, scales or log-sum-exp are wrong."""

from __future__ import annotations

from flashtune.core.problem import Causal, Dtype
from tests.mutants.core import Mutant, Patch
from tests.mutants.forward_hopper.hopper import CAUSAL_LSE, EAGER, FULL, a_small_problem, only, subject

LSE = "row_lse = lse_log2 * LN_2"
RESCALED = "accumulator = rescale_output(rescale, accumulator)"
CLEARED = "accumulator = gl.zeros([GROUP_M, 128], gl.float32, O_LAYOUT)"
VOTE = "${rows + row}, 0; or.pred"
FP16 = subject(a_small_problem(dtype=Dtype.FP16))
TALL = subject(
    a_small_problem(64, causal=Causal.BOTTOM_RIGHT), num_consumer_groups=2, rows_per_group=128, block_n=64
)


def rescaling() -> tuple[Mutant, ...]:
    """Running maxima, and what must follow them."""
    return (
        Mutant(
            "rescaling left out",
            "Outputs keep a scale that maxima have left behind.",
            EAGER,
            only(RESCALED, "pass"),
        ),
        Mutant(
            "rescaling late by a block",
            "Outputs are rescaled by the factor of the block before.",
            EAGER,
            (
                Patch(CLEARED, f"{CLEARED}\nlate = gl.full([GROUP_M], 1.0, gl.float32, ROW_LAYOUT)"),
                Patch(RESCALED, f"{RESCALED.replace('(rescale,', '(late,')}\nlate = rescale"),
            ),
        ),
        Mutant(
            "rescaling twice",
            "Outputs are rescaled twice for each new maximum.",
            EAGER,
            only(RESCALED, f"{RESCALED}\n{RESCALED}"),
        ),
        Mutant(
            "sum not rescaled",
            "The sum of weights keeps a scale that the maximum has left behind.",
            FULL,
            only("running_sum * sum_rescale[:, None]", "running_sum"),
        ),
        Mutant(
            "maximum not kept",
            "The running maximum falls where it should rise.",
            EAGER,
            only("row_max = new_max", "row_max = gl.minimum(row_max, new_max)"),
        ),
        Mutant(
            "maxima never below zero",
            "Rows whose scores are all far below zero lose every weight.",
            FULL,
            only(
                "row_max = gl.max(s, 1) * s_scale_log2",
                "row_max = gl.maximum(gl.max(s, 1) * s_scale_log2, 0.0)",
            ),
        ),
        Mutant(
            "growth never acted upon",
            "Lazy rescaling is never done.",
            FULL,
            only("if needs_rescale(GROUP):", "if GROUP < 0:"),
        ),
        Mutant(
            "second row of a thread has no vote",
            "A warp is rescaled when some first row of a thread has grown.",
            FULL,
            only(VOTE, "${rows}, 0; or.pred"),
        ),
        Mutant(
            "first row of a thread has no vote",
            "A warp is rescaled when some second row of a thread has grown.",
            FULL,
            only(VOTE, "${2 * rows - 1}, 0; or.pred"),
        ),
        Mutant(
            "a vote must be unanimous",
            "A warp is rescaled when all of its lanes have grown.",
            FULL,
            only("vote.sync.any.pred", "vote.sync.all.pred"),
        ),
        Mutant(
            "lower rows of a tall tile have no vote",
            "Of four rows of a thread only two count.",
            TALL,
            only(VOTE, "${rows + row % 2}, 0; or.pred"),
        ),
        Mutant(
            "slack without bounds",
            "No growth of a maximum is ever followed.",
            FULL,
            only("gl.constexpr(8.0)", "gl.constexpr(1e30)"),
        ),
        Mutant(
            "slack beyond fp16",
            "Weights outgrow fp16 before a maximum is followed.",
            FP16,
            only("gl.constexpr(8.0)", "gl.constexpr(18.0)"),
        ),
    )


def scales() -> tuple[Mutant, ...]:
    """The scale of scores, and the log-sum-exp."""
    scaled = "scale_log2 = scale * LOG2_E"
    return (
        Mutant(
            "scale applied twice",
            "Scores are scaled by the square of the scale.",
            FULL,
            only(scaled, "scale_log2 = scale * scale * LOG2_E"),
        ),
        Mutant(
            "natural exponentials",
            "Powers of two are taken of scores in natural units.",
            FULL,
            only(scaled, "scale_log2 = scale"),
        ),
        Mutant(
            "lse in base 2",
            "The log-sum-exp is in units of log2.",
            CAUSAL_LSE,
            only(LSE, "row_lse = row_max + gl.log2(row_sum)"),
        ),
        Mutant(
            "lse without the maximum",
            "The log-sum-exp lacks the maximum of the scores.",
            CAUSAL_LSE,
            only(LSE, "row_lse = gl.log2(row_sum) * LN_2"),
        ),
        Mutant(
            "lse of the maximum alone",
            "The log-sum-exp lacks the sum.",
            CAUSAL_LSE,
            only(LSE, "row_lse = row_max * LN_2 + 0.0 * row_sum"),
        ),
    )
