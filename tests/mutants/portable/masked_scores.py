"""Mutants of the masked family: scores and probabilities."""

from __future__ import annotations

from flashtune.core.problem import Bias, Causal, Dtype
from tests.mutants.core import Mutant, Part, Patch
from tests.mutants.serving_size import Change, Size, change, mutants_of

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
    changes = (
        change("cap left out", "Scores are not changed.", capped, "return cap_log2 * s"),
        change("cap after the mask", "Hidden keys have the least score that there is, and some weight.",
               HIDE, "s = tl.where(visible, s, -cap_log2)"),
        change("cap not taken off first", "The hyperbolic tangent is of scores that the cap did not divide.",
               "score_factor = scale / softcap", "score_factor = scale"),
        change("cap in natural units", "Powers of two are taken of capped scores in natural units.",
               "cap_log2 = softcap * LOG2_E", "cap_log2 = softcap"),
        change("cap's exponential to base 2", "The hyperbolic tangent is made of powers of two.",
               "(2.0 * LOG2_E)", "2.0"),
    )  # fmt: skip
    return mutants_of(size.masked(softcap=True), changes)


def slopes(size: Size) -> tuple[Mutant, ...]:
    """What distance takes off, without a mask."""
    changes = (
        change("slope of another head", "Query heads of a group have one slope.",
               SLOPE, SLOPE.replace("+ head", "+ kv_head")),
        change("slope of the first sequence", "All sequences have the slopes of one.",
               SLOPE, SLOPE.replace("sequence * stride_slopes_b", "0")),
        change("slope of the wrong sign", "The bias of far keys has the wrong sign.",
               "s -= slope_log2", "s += slope_log2", LOOPS),
        change("slope in natural units", "Powers of two are taken of distances in natural units.",
               SLOPE, SLOPE.replace(" * LOG2_E", "")),
        change("distance with a sign", "Keys behind a query gain by their distance.",
               "tl.abs(distance)", "distance", LOOPS),
        change("distance within a block", "Distances begin anew with each block of keys.",
               "(position_numbers - start)", "position_numbers", LOOPS),
        change("distance from a query's number", "Distances are measured from the other corner.",
               "position_numbers = positions", "position_numbers = queries"),
    )  # fmt: skip
    return mutants_of(size.masked(alibi=True, causal=Causal.NONE), changes)


def biases(size: Size) -> tuple[Mutant, ...]:
    """Numbers that are added to scores."""
    changes = (
        change("bias of another head", "Query heads of a group have one bias.",
               BIAS_BASE, BIAS_BASE.replace("+ head", "+ kv_head")),
        change("bias of the first sequence", "All sequences have the bias of one.",
               BIAS_BASE, BIAS_BASE.replace("sequence.to(tl.int64)", "0")),
        change("bias of sequences by the stride of heads", "Sequences lie as far apart as heads do.",
               BIAS_BASE, BIAS_BASE.replace("stride_bias_b", "stride_bias_h")),
        change("bias of the first tile", "All tiles of queries have the bias of one.",
               BIAS_BASE, BIAS_BASE.replace("+ first_query", "+ 0")),
        change("bias of a tile's first row", "It is broadcast over the rows of a tile.",
               "(bias_queries - first_query) * stride_bias_s", "(bias_queries * 0) * stride_bias_s"),
        change("bias of a block's first keys", "All blocks have the bias of the first.",
               "(bias_rows[:, None] + keys[None, :])", "(bias_rows[:, None] + key_offsets[None, :])", LOOPS),
        change("bias in units of log2", "The bias is too large.", ADD_BIAS, ADD_BIAS + " * LOG2_E", LOOPS),
        change("bias taken off", "It has the wrong sign.", ADD_BIAS, ADD_BIAS.replace("+", "-"), LOOPS),
        change("bias before the scale", "It is scaled as the scores are.",
               ADD_BIAS, "s = (s + bias_tile.to(tl.float32)) * score_scale", LOOPS),
        change("rows that a bias hides shifted by -inf", "A row whose keys are all hidden turns NaN.",
               SHIFT, "shift = new_max"),
    )  # fmt: skip
    return mutants_of(size.masked(bias=Bias.ADDITIVE), changes)


def hidden(size: Size) -> tuple[Mutant, ...]:
    """Keys that a boolean bias hides."""
    changes = (
        change("hidden keys of open blocks seen", "A bias hides keys where the diagonal is near alone.",
               "visible = tl.load(bias_at) != 0", "visible = (keys >= 0)[None, :]"),
        change("hidden keys of masked blocks seen", "A bias hides no keys where the diagonal is near.",
               "visible &= tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0) != 0", "pass"),
        change("hidden keys seen", "The bias means the opposite in open blocks.",
               "visible = tl.load(bias_at) != 0", "visible = tl.load(bias_at) == 0"),
        change("a bias without the diagonal", "Where a bias shows a key the causal mask hides it no more.",
               "visible = keys[None, :] < row_end[:, None]", "visible = (keys < seqlen_kv)[None, :]"),
    )  # fmt: skip
    return mutants_of(size.masked(bias=Bias.BOOLEAN), changes)


def sinks(size: Size) -> tuple[Mutant, ...]:
    """A score of each head that has no value."""
    kept = "running_sum * kept + tl.exp2(sink_log2 - shift)"
    changes = (
        change("sink forgotten", "It takes no weight.", kept, "running_sum * kept"),
        change("sink twice", "It takes twice its weight.", kept, kept.replace("+ tl", "+ 2.0 * tl")),
        change("sink of another head", "Query heads of a group have one sink.",
               SINK, SINK.replace("head", "kv_head")),
        change("sink scaled", "It is scaled as the scores are.",
               SINK, SINK.replace("LOG2_E", "scale * LOG2_E")),
        change("sink in natural units", "Powers of two are taken of a sink in natural units.",
               SINK, SINK.replace(" * LOG2_E", "")),
        change("outputs not rescaled for the sink", "Outputs keep a scale that the sink has left behind.",
               "accumulator * kept[:, None]", "accumulator"),
        change("sum not rescaled for the sink", "The sum of weights keeps it.",
               kept, kept.replace("running_sum * kept", "running_sum")),
        change("maximum of the sink alone", "Weights far above a sink overflow.",
               LARGEST, "largest = sink_log2"),
        change("maximum without the sink", "Rows that see no key have no log-sum-exp.",
               LARGEST, "largest = running_max"),
        change("lse without the sink", "The log-sum-exp keeps the maximum of the keys.",
               "running_max = largest", "pass"),
    )  # fmt: skip
    return mutants_of(size.masked(sinks=True), changes)


def softmax(size: Size) -> tuple[Mutant, ...]:
    """Maxima, sums and the log-sum-exp where sequences have lengths of their own."""
    # In 16 bits no tile of values is narrower.
    columns = "columns_32" if size.dtype is Dtype.FP32 else "columns_64"
    changes = (
        Change("outputs of masked blocks not rescaled", "They keep a scale that the maximum has left behind.",
               (Patch("accumulator * rescale[:, None]", "accumulator", BAND),)),
        Change("sum of masked blocks not rescaled", "It keeps a scale that the maximum has left behind.",
               (Patch(SUM, SUM.replace("rescale", "(1.0 if IS_PARTIAL else rescale)")),)),
        change("maximum not kept", "The running maximum falls where it should rise.",
               "return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),
        change("rows without a key divided by zero", "A row that sees no key is NaN.",
               "tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
        change("rows without a key shifted by -inf", "A row that has seen no key yet turns NaN.",
               SHIFT, "shift = new_max"),
        change("lse in base 2", "The log-sum-exp is in units of log2.", LSE, LSE.replace(" * LN_2", "")),
        change("lse without the maximum", "The log-sum-exp lacks the maximum of the scores.",
               LSE, LSE.replace("running_max + ", "")),
        change("scale twice", "Scores are scaled by the square of the scale.",
               "scale_log2 = scale *", "scale_log2 = scale * scale *"),
        change("tail of V read", "Rows behind the last value are read and weighted with zero.",
               f"{KEY_EXISTS} & ({columns} < VALUE",
               f"{KEY_EXISTS.replace('_kv', '_kv + 3')} & ({columns} < VALUE"),
    )  # fmt: skip
    return mutants_of(size.masked(kv_lengths=True), changes)
