"""Mutants of Hopper kernels with a mask or bias of pairs, and of the prologue that lists their blocks."""

from flashtune.core.problem import Bias, Causal
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import PRODUCER, a_small_problem, subject

MASK = subject(
    a_small_problem(64, Causal.NONE, batch=2, bias=Bias.BOOLEAN),
    lse=True,
    num_consumer_groups=2,
    block_n=64,
)
BIAS = subject(a_small_problem(64, Causal.NONE, batch=2, bias=Bias.ADDITIVE), lse=True, block_n=64)
CAUSAL = subject(
    a_small_problem(64, Causal.BOTTOM_RIGHT, batch=2, bias=Bias.BOOLEAN, window_left=100),
    lse=True,
    num_consumer_groups=2,
    block_n=64,
)
FIRST = Part("# The first block has its own code", "range(1, n_entries):")
VALUES = Part("sum_rescale = ", "q_state = q.release(q_state")
COPY = Part("def copy_bias(", "def issue_qk(")
LATER = Part("range(1, n_entries):", "q_state = q.release(q_state")
MASK_KIND = Part("def classify_blocks(", "def largest(")
BIAS_KIND = Part("def get_kind(", "def classify_blocks(")
LISTING = Part("def list_blocks(", "def prologue_plan(")


def pairs() -> tuple[Mutant, ...]:
    """Those of the kernel itself."""
    words = "s = mask_by_words(s, words, is_partial)"
    added = "s = add_bias(s, bias_values, score_scale, is_partial)"
    return (
        *mutants_of(MASK, (
            ("mask: not in first blocks", words, "pass", FIRST),
            ("mask: not in later blocks", words, "pass", LATER),
            ("mask: pairs of columns swapped",
             "place // 4 * 2 + place % 2", "place // 4 * 2 + 1 - place % 2"),
            ("mask: words of the first thread",
             "rows * 4 + gl.arange(0, 4,", "rows * 4 + 0 * gl.arange(0, 4,"),
            ("mask: eights in reverse", "(place // 4 * 2 +", "(count // 2 - 2 - place // 4 * 2 +"),
            ("mask: words of the last block",
             "n_block, is_partial, no_scores", "n_last, is_partial, no_scores", LATER),
            ("mask: words of the first group", "table * GROUPS + GROUP)", "table * GROUPS)"),
            ("mask: head 0", "head = gl.minimum(", "head = 0 * gl.minimum("),
            ("mask: batch 0", "batch = gl.minimum(tile", "batch = 0 * gl.minimum(tile"),
            ("lists: keys of the next block",
             "(gl.load(entries + step) >>", "(gl.load(entries + step + (step < n_further)) >>", PRODUCER),
        )),
        *mutants_of(BIAS, (
            ("bias: scores in units of log2", "s_scale_log2 * LN_2", "s_scale_log2"),
            ("bias: unscaled products", "s_scale_log2 * LN_2", "1.0"),
            ("bias: rows of the first group", " + GROUP * GROUP_POSITIONS", "", COPY),
            ("bias: not in first blocks", added, "s = s * score_scale", FIRST),
        )),
        *mutants_of(MASK, (
            ("lists: skipped keys stay", "k_state = skip_keys(GROUP, k, k_state)", "pass", LATER),
            ("lists: skipped values stay", "range(n_skipped)", "range(0 * n_skipped)", VALUES),
            ("lists: blocks after the last one stay", "passed = gl.load(entries + 2)", "passed = 0"),
            ("lists: blocks before the first one stay",
             "passed += gl.where(more, gl.load(entries + 1), 0)", "pass"),
        ), hangs=True),
        *mutants_of(BIAS, (
            ("bias: tile never released",
             "bias_state = bias.release(bias_state, GROUP)", "bias_state = bias.advance(bias_state)"),
        ), hangs=True),
    )  # fmt: skip


def listings() -> tuple[Mutant, ...]:
    """Those of the prologue."""
    return (
        *mutants_of(MASK, (
            ("classes: partial blocks whole", "(counts >> 16) == n_fours", "(counts >> 16) > 0", MASK_KIND),
            ("classes: nearly whole blocks",
             "(counts >> 16) == n_fours", "(counts >> 16) > n_fours - 500", MASK_KIND),
            ("classes: words of the first keys", "split >> (2 *", "split >> (0 *", MASK_KIND),
            ("classes: words of the first rows", "bias + m_start * stride_bias_s", "bias", MASK_KIND),
            ("classes: keys of the first block",
             "places = n_block * (BLOCK_N // 4) +", "places = 0 * n_block +", MASK_KIND),
            ("listing: kinds of the first group",
             "kinds + 1 * n_blocks + blocks,", "kinds + 0 * n_blocks + blocks,", LISTING),
            ("listing: partial blocks whole", "is_taken & (kind_1 != 1)", "is_taken & (kind_1 > 2)", LISTING),
        )),
        *mutants_of(CAUSAL, (
            ("classes: no diagonal", "positions + 0 + 1)", "positions + 0 + 2)"),
            ("classes: no window", "start = positions - 100", "start = positions - 101"),
        )),
        *mutants_of(BIAS, (
            ("classes: bias of hidden keys", "(given != 0.0)", "(given > 0.0)", BIAS_KIND),
            ("classes: biased blocks hidden", "tl.store(kinds + blocks, 2,", "tl.store(kinds + blocks, 0,"),
        )),
    )  # fmt: skip
