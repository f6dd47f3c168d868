"""Mutants of the masked family: scores and probabilities."""

from flashtune.core.problem import Bias, Causal, Dtype
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.serving_size import Size

# A block of keys is worked on where no mask touches it, and in a loop of all others.
LOOPS = 2
HIDE = 's = tl.where(visible, s, float("-inf"))'
SHIFT = 'shift = tl.where(new_max == float("-inf"), 0.0, new_max)'
BIAS_BASE = "sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + first_query * stride_bias_s"
ADD_BIAS = "s = s * score_scale + bias_tile.to(tl.float32)"
SLOPE = "tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E"
SINK = "tl.load(sinks + head) * LOG2_E"
LARGEST = "largest = tl.maximum(running_max, sink_log2)"
SUM = "running_sum * rescale + tl.sum(p, 1)"
KEY_EXISTS = "mask=(keys < seqlen_kv)[:, None]"
LSE = "row_lse = (running_max + tl.log2(running_sum)) * LN_2"
BAND = Part("for start in tl.range(n_full_max,", "# Without a visible key")


def scores(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (*caps(size), *slopes(size), *biases(size), *hidden(size), *sinks(size), *softmax(size))


def caps(size: Size) -> tuple[Mutant, ...]:
    """Capped scores."""
    capped = "return cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s * (2.0 * LOG2_E)))"
    if size.dtype is Dtype.FP32:
        capped = "return cap_log2 * tl.where(square < 0.16, s + s * square * series, steep)"
    return mutants_of(size.masked(softcap=True), (
        ("cap left out", capped, "return cap_log2 * s"),
        # Hidden keys have the least score that there is, and some weight.
        ("cap after the mask", HIDE, "s = tl.where(visible, s, -cap_log2)"),
        ("cap not taken off first", "score_factor = scale / softcap", "score_factor = scale"),
        ("cap in natural units", "cap_log2 = softcap * LOG2_E", "cap_log2 = softcap"),
        ("cap's exponential to base 2", "(2.0 * LOG2_E)", "2.0"),
    ))  # fmt: skip


def slopes(size: Size) -> tuple[Mutant, ...]:
    """Mutants of the bias by distance (ALiBi), without a mask."""
    return mutants_of(size.masked(alibi=True, causal=Causal.NONE), (
        ("slope of another head", SLOPE, SLOPE.replace("+ head", "+ kv_head")),
        ("slope of the first sequence", SLOPE, SLOPE.replace("sequence * stride_slopes_b", "0")),
        ("slope of the wrong sign", "s -= slope_log2", "s += slope_log2", None, LOOPS),
        ("slope in natural units", SLOPE, SLOPE.replace(" * LOG2_E", "")),
        ("distance with a sign", "tl.abs(distance)", "distance", None, LOOPS),
        ("distance within a block", "(position_numbers - start)", "position_numbers", None, LOOPS),
        ("distance from a query's number", "position_numbers = positions", "position_numbers = queries"),
    ))  # fmt: skip


def biases(size: Size) -> tuple[Mutant, ...]:
    """Numbers that are added to scores."""
    return mutants_of(size.masked(bias=Bias.ADDITIVE), (
        ("bias of another head", BIAS_BASE, BIAS_BASE.replace("+ head", "+ kv_head")),
        ("bias of the first sequence", BIAS_BASE, BIAS_BASE.replace("sequence.to(tl.int64)", "0")),
        ("bias of sequences by the stride of heads",
         BIAS_BASE, BIAS_BASE.replace("stride_bias_b", "stride_bias_h")),
        ("bias of the first tile", BIAS_BASE, BIAS_BASE.replace("+ first_query", "+ 0")),
        ("bias of a tile's first row",
         "(bias_queries - first_query) * stride_bias_s", "(bias_queries * 0) * stride_bias_s"),
        ("bias of a block's first keys",
         "(bias_rows[:, None] + keys[None, :])", "(bias_rows[:, None] + key_offsets[None, :])", None, LOOPS),
        ("bias in units of log2", ADD_BIAS, ADD_BIAS + " * LOG2_E", None, LOOPS),
        ("bias taken off", ADD_BIAS, ADD_BIAS.replace("+", "-"), None, LOOPS),
        ("bias before the scale", ADD_BIAS, "s = (s + bias_tile.to(tl.float32)) * score_scale", None, LOOPS),
        # A row whose keys are all hidden turns NaN.
        ("rows that a bias hides shifted by -inf", SHIFT, "shift = new_max"),
    ))  # fmt: skip


def hidden(size: Size) -> tuple[Mutant, ...]:
    """Keys that a boolean bias hides."""
    return mutants_of(size.masked(bias=Bias.BOOLEAN), (
        ("hidden keys of open blocks seen",
         "visible = tl.load(bias_at) != 0", "visible = (keys >= 0)[None, :]"),
        ("hidden keys of masked blocks seen",
         "visible &= tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0) != 0", "pass"),
        ("hidden keys seen", "visible = tl.load(bias_at) != 0", "visible = tl.load(bias_at) == 0"),
        ("a bias without the diagonal",
         "visible = keys[None, :] < row_end[:, None]", "visible = (keys < seqlen_kv)[None, :]"),
    ))  # fmt: skip


def sinks(size: Size) -> tuple[Mutant, ...]:
    """A score of each head that has no value."""
    kept = "running_sum * kept + tl.exp2(sink_log2 - shift)"
    return mutants_of(size.masked(sinks=True), (
        ("sink forgotten", kept, "running_sum * kept"),
        ("sink twice", kept, kept.replace("+ tl", "+ 2.0 * tl")),
        ("sink of another head", SINK, SINK.replace("head", "kv_head")),
        ("sink scaled", SINK, SINK.replace("LOG2_E", "scale * LOG2_E")),
        ("sink in natural units", SINK, SINK.replace(" * LOG2_E", "")),
        ("outputs not rescaled for the sink", "accumulator * kept[:, None]", "accumulator"),
        ("sum not rescaled for the sink", kept, kept.replace("running_sum * kept", "running_sum")),
        ("maximum of the sink alone", LARGEST, "largest = sink_log2"),
        ("maximum without the sink", LARGEST, "largest = running_max"),
        ("lse without the sink", "running_max = largest", "pass"),
    ))  # fmt: skip


def softmax(size: Size) -> tuple[Mutant, ...]:
    """Maxima, sums and the log-sum-exp where sequences have lengths of their own."""
    # In 16 bits no tile of values is narrower.
    columns = "columns_32" if size.dtype is Dtype.FP32 else "columns_64"
    return mutants_of(size.masked(kv_lengths=True), (
        ("outputs of masked blocks not rescaled", "accumulator * rescale[:, None]", "accumulator", BAND),
        ("sum of masked blocks not rescaled",
         SUM, SUM.replace("rescale", "(1.0 if IS_PARTIAL else rescale)")),
        ("maximum not kept",
         "return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),
        ("rows without a key divided by zero",
         "tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
        ("rows without a key shifted by -inf", SHIFT, "shift = new_max"),
        ("lse in base 2", LSE, LSE.replace(" * LN_2", "")),
        ("lse without the maximum", LSE, LSE.replace("running_max + ", "")),
        ("scale twice", "scale_log2 = scale *", "scale_log2 = scale * scale *"),
        ("tail of V read",
         f"{KEY_EXISTS} & ({columns} < VALUE",
         f"{KEY_EXISTS.replace('_kv', '_kv + 3')} & ({columns} < VALUE"),
    ))  # fmt: skip
