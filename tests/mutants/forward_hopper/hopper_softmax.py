"""Mutants of Hopper kernels whose maxima, sums, scales or log-sum-exp are wrong."""

from flashtune.core.problem import Causal, Dtype
from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import CAUSAL_LSE, EAGER, FULL, a_small_problem, subject

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
        *mutants_of(EAGER, (
            ("rescaling left out", RESCALED, "pass"),
            ("rescaling late by a block",
             (Patch(CLEARED, f"{CLEARED}\nlate = gl.full([GROUP_M], 1.0, gl.float32, ROW_LAYOUT)"),
              Patch(RESCALED, f"{RESCALED.replace('(rescale,', '(late,')}\nlate = rescale"))),
            ("rescaling twice", RESCALED, f"{RESCALED}\n{RESCALED}"),
            ("maximum not kept", "row_max = new_max", "row_max = gl.minimum(row_max, new_max)"),
        )),
        *mutants_of(FULL, (
            ("sum not rescaled", "running_sum * sum_rescale[:, None]", "running_sum"),
            ("maxima never below zero",
             "row_max = gl.max(s, 1) * s_scale_log2",
             "row_max = gl.maximum(gl.max(s, 1) * s_scale_log2, 0.0)"),
            ("growth never acted upon", "if needs_rescale(GROUP):", "if GROUP < 0:"),
            ("second row of a thread has no vote", VOTE, "${rows}, 0; or.pred"),
            ("first row of a thread has no vote", VOTE, "${2 * rows - 1}, 0; or.pred"),
            ("a vote must be unanimous", "vote.sync.any.pred", "vote.sync.all.pred"),
            ("slack without bounds", "gl.constexpr(8.0)", "gl.constexpr(1e30)"),
        )),
        *mutants_of(TALL, (
            ("lower rows of a tall tile have no vote", VOTE, "${rows + row % 2}, 0; or.pred"),
        )),
        *mutants_of(FP16, (
            # Weights outgrow fp16 before a maximum is followed.
            ("slack beyond fp16", "gl.constexpr(8.0)", "gl.constexpr(18.0)"),
        )),
    )  # fmt: skip


def scales() -> tuple[Mutant, ...]:
    """The scale of scores, and the log-sum-exp."""
    scaled = "scale_log2 = scale * LOG2_E"
    return (
        *mutants_of(FULL, (
            ("scale applied twice", scaled, "scale_log2 = scale * scale * LOG2_E"),
            ("natural exponentials", scaled, "scale_log2 = scale"),
        )),
        *mutants_of(CAUSAL_LSE, (
            ("lse in base 2", LSE, "row_lse = row_max + gl.log2(row_sum)"),
            ("lse without the maximum", LSE, "row_lse = gl.log2(row_sum) * LN_2"),
            ("lse of the maximum alone", LSE, "row_lse = row_max * LN_2 + 0.0 * row_sum"),
        )),
    )  # fmt: skip
