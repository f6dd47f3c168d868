"""Mutants of Hopper kernels with a mask or bias of pairs, and of the prologue that lists their blocks."""

from __future__ import annotations

from flashtune.core.problem import Bias, Causal
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import PRODUCER, a_small_problem, only, subject

MASK = subject(a_small_problem(64, Causal.NONE, batch=2, bias=Bias.BOOLEAN), lse=True, block_n=64)
BIAS = subject(a_small_problem(64, Causal.NONE, batch=2, bias=Bias.ADDITIVE), lse=True, block_n=64)
CAUSAL = subject(
    a_small_problem(64, Causal.BOTTOM_RIGHT, batch=2, bias=Bias.BOOLEAN, window_left=100),
    lse=True,
    block_n=64,
)
FIRST = Part("# The first block has its own code", "range(1, n_entries):")
VALUES = Part("sum_rescale = ", "q_state = q.release(q_state")
COPY = Part("def copy_bias(", "def issue_qk(")
LATER = Part("range(1, n_entries):", "q_state = q.release(q_state")
KIND, LISTING = Part("def get_kind(", "def list_blocks("), Part("def list_blocks(", "def prologue_plan(")
APPEND, FINISH = Part("def append(", "def finish("), Part("def finish(", "def load_visible(")


def pairs() -> tuple[Mutant, ...]:
    """Those of the kernel itself."""
    words = "s = mask_by_words(s, words, is_partial)"
    added = "s, bias_state = add_bias(GROUP, s, bias_scale_log2, bias, bias_state, is_partial)"
    return mutants_of(
        (
            ("mask: not in first blocks", "Hidden keys count.", MASK, only(words, "pass", FIRST)),
            ("mask: not in later blocks", "Hidden keys count.", MASK, only(words, "pass", LATER)),
            ("mask: pairs of columns swapped", "Another mask.", MASK, only("+ pairs[", "+ 1 - pairs[")),
            (
                "mask: words of the first thread",
                "Shifted masks.",
                MASK,
                only(">> (2 * threads)", ">> (0 * threads)"),
            ),
            ("mask: eights in reverse", "Another mask.", MASK, only("(8 * eights)", "(24 - 8 * eights)")),
            (
                "mask: words of the last block",
                "Another mask.",
                MASK,
                only("n_block, is_partial, no_scores", "n_last, is_partial, no_scores", LATER),
            ),
            (
                "mask: words of the first group",
                "Another mask.",
                MASK,
                only("table * GROUPS + GROUP)", "table * GROUPS)"),
            ),
            (
                "mask: head 0",
                "One mask for all heads.",
                MASK,
                only("head = gl.minimum(", "head = 0 * gl.minimum("),
            ),
            (
                "mask: batch 0",
                "One mask for all batches.",
                MASK,
                only("batch = gl.minimum(tile", "batch = 0 * gl.minimum(tile"),
            ),
            (
                "bias: natural units",
                "The bias is too small.",
                BIAS,
                only(".to(gl.float32), LOG2_E,", ".to(gl.float32), 1.0,"),
            ),
            ("bias: unscaled products", "Scores without a tile.", BIAS, only("s = s * scale_log2", "pass")),
            (
                "bias: rows of the first group",
                "Another bias.",
                BIAS,
                only(" + GROUP * GROUP_POSITIONS", "", COPY),
            ),
            (
                "bias: not in first blocks",
                "Scores without a bias.",
                BIAS,
                only(added, "s = s * bias_scale_log2", FIRST),
            ),
            (
                "lists: keys of the next block",
                "Keys of another block.",
                MASK,
                only(
                    "(gl.load(entries + step) >>",
                    "(gl.load(entries + step + (step < n_further)) >>",
                    PRODUCER,
                ),
            ),
        )
    ) + mutants_of(
        (
            (
                "lists: skipped keys stay",
                "The next block's keys are the skipped ones.",
                MASK,
                only("k_state = skip_keys(GROUP, k, k_state)", "pass", LATER),
            ),
            (
                "lists: skipped values stay",
                "Values of the skipped block.",
                MASK,
                only("range(n_skipped)", "range(0 * n_skipped)", VALUES),
            ),
            (
                "lists: blocks after the last one stay",
                "The next tile has them.",
                MASK,
                only("passed = gl.load(entries + 2)", "passed = 0"),
            ),
            (
                "lists: blocks before the first one stay",
                "Other blocks.",
                MASK,
                only("passed += gl.where(more, gl.load(entries + 1), 0)", "pass"),
            ),
            (
                "bias: tile never released",
                "The producer waits.",
                BIAS,
                only("bias_state = bias.release(bias_state, GROUP)", "bias_state = bias.advance(bias_state)"),
            ),
        ),
        hangs=True,
    )


def listings() -> tuple[Mutant, ...]:
    """Those of the prologue."""
    return mutants_of(
        (
            (
                "listing: partial blocks whole",
                "No masks.",
                MASK,
                only("n_visible == n_pairs", "n_visible > 0", KIND),
            ),
            (
                "listing: nearly whole blocks",
                "Some hidden keys count.",
                MASK,
                only("n_visible == n_pairs", "n_visible > n_pairs - 2000", KIND),
            ),
            (
                "listing: bits of one word",
                "Half of a mask.",
                MASK,
                only("* ROW_WORDS + tl.arange", "* ROW_WORDS + 0 * tl.arange", KIND),
            ),
            (
                "listing: rows of the first group",
                "Masks of others.",
                MASK,
                only("0) * TILE_POSITIONS + 1 * GROUP", "0) * TILE_POSITIONS + 0 * GROUP", LISTING),
            ),
            (
                "listing: the next block",
                "Masks of others.",
                MASK,
                only("tl.maximum(n_block - 1, 0)", "tl.maximum(n_block, 0)", LISTING, times=2),
            ),
            (
                "listing: many skipped",
                "Groups wait for each other.",
                MASK,
                only("(n_passed < MAX_SKIPPED)", "(n_passed < 99)", APPEND),
            ),
            (
                "listing: no first blocks skipped",
                "Wrong keys.",
                MASK,
                only("tl.store(entries + 1, n_passed,", "tl.store(entries + 1, 0,", APPEND),
            ),
            (
                "listing: none passed after the last",
                "Wrong keys.",
                MASK,
                only("tl.where(is_blind, 0, n_passed)", "0", FINISH),
            ),
            (
                "listing: blind groups",
                "Wrong keys.",
                MASK,
                only("tl.where(is_blind, 1, n_entries)", "n_entries", FINISH),
            ),
            (
                "listing: no diagonal",
                "Keys after the query.",
                CAUSAL,
                only("keys <= positions + 0", "keys <= positions + 1"),
            ),
            (
                "listing: no window",
                "Keys before the window.",
                CAUSAL,
                only("keys >= positions - 100", "keys >= positions - 101"),
            ),
            (
                "listing: sampled row alone",
                "Hidden blocks count.",
                BIAS,
                only("sample != 0.0", "sample == 0.0", KIND),
            ),
            (
                "listing: -inf whole",
                "Hidden keys count.",
                BIAS,
                only("(given != 0.0) & visible", "(given > 0.0) & visible", KIND),
            ),
        )
    )
