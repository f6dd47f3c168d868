"""Mutants of the decoding family: masks, scores, and conversion of 8-bit values."""

from __future__ import annotations

from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale
from tests.mutants.core import Mutant, Patch
from tests.mutants.serving_size import FIRST_TOKENS, SMALL_PAGE, Change, Size, change, mutants_of

START = "row_start = key_start(positions)"
LIFTED = "tl.minimum(stop, FIRST_TOKENS)"
LIFTED_STOP = "n_lifted = tl.minimum(tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N, n_min)"
STEP = "start = tl.where(step < n_lifted, step, step + skipped)"
SLOPE = "tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E"
BIAS_ROWS = "sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + queries * stride_bias_s"
WAIT, FIRST_KEY = "tl.extra.cuda.gdc_wait()", "first = split * blocks // splits * BLOCK_N"
SINK = "tl.load(sinks + head) * LOG2_E"
# Wide enough that stored bytes are loaded in pairs, and what is not.
PAIRED, SINGLE = 64, 32


def rows(size: Size) -> tuple[Mutant, ...]:
    """All that run anywhere."""
    return (*windows(size), *chunks(size), *changed(size), *biases(size), *sinks(size))


def windows(size: Size) -> tuple[Mutant, ...]:
    """A window that leaves the first tokens visible."""
    changes = (
        change("window one key too far", "Every query sees the key before its window.",
               START, START.replace("positions", "positions - 1")),
        change("window one key too short", "No query sees the first key of its window.",
               START, START.replace("positions", "positions + 1")),
        change("window of the tile's first row", "All queries see back as far as the first.",
               START, START.replace("positions", "positions * 0 + first_position")),
        change("first tokens one too many", "The key behind the first tokens stays visible too.",
               LIFTED, LIFTED.replace("TOKENS", "TOKENS + 1")),
        change("first tokens one too few", "The last of the first tokens is hidden by windows.",
               LIFTED, LIFTED.replace("TOKENS", "TOKENS - 1")),
        change("first block of the window skipped", "A block that only some keys of are seen is left out.",
               "n_min = first_start // BLOCK_N", "n_min = tl.cdiv(first_start, BLOCK_N)"),
        change("blocks of the first tokens skipped", "First tokens that fill no block are left out.",
               LIFTED_STOP, LIFTED_STOP.replace("tl.cdiv(last_lifted, BLOCK_N)", "last_lifted // BLOCK_N")),
        change("blocks of the first tokens twice", "First tokens that are in the window count twice.",
               LIFTED_STOP, "n_lifted = tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N"),
        change("keys between read for the window's", "Keys after the first tokens are read.",
               STEP, "start = step"),
        change("first tokens read as the window's", "In place of the first tokens comes the window's start.",
               STEP, "start = step + skipped"),
    )  # fmt: skip
    return mutants_of(size.decoding(window_left=size.near, sink_tokens=FIRST_TOKENS), changes)


def chunks(size: Size) -> tuple[Mutant, ...]:
    """Chunks, which a few queries lie in two of."""
    begin = "first_position = tile * BLOCK_M // group_size"
    changes = (
        change("chunk one query early", "The last query of a chunk sees the next one's keys alone.",
               START, START.replace("positions", "tl.maximum(positions, 0) + 1")),
        change("chunk one query late", "The first query of a chunk sees the chunk before.",
               START, START.replace("positions", "positions - 1")),
        change("chunk without its first key", "No query sees the first key of its chunk.",
               START, f"{START} + 1"),
        change("blocks of the last query's chunk", "Blocks of the first query's chunk are left out.",
               begin, "first_position = (tile * BLOCK_M + BLOCK_M - 1) // group_size"),
        change("parts of a band from the start", "Parts begin at the sequence's start, not at the chunk's.",
               "tl.range(n_min + first, n_min + last,", "tl.range(first, last,"),
    )  # fmt: skip
    return mutants_of(size.decoding(chunk=size.chunk), changes)


def changed(size: Size) -> tuple[Mutant, ...]:
    """Scores that are capped, and that distance is taken off."""
    capped = "return cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s * (2.0 * LOG2_E)))"
    if size.dtype is Dtype.FP32:
        capped = "return cap_log2 * tl.where(square < 0.16, s + s * square * series, steep)"
    hide = 's = tl.where(visible, s, float("-inf"))'
    changes = (
        change("cap left out", "Scores are not changed.", capped, "return cap_log2 * s"),
        change("cap after the mask", "Hidden keys have the least score that there is, and some weight.",
               hide, "s = tl.where(visible, s, -cap_log2)"),
        change("cap not taken off first", "The hyperbolic tangent is of scores that the cap did not divide.",
               "score_factor = scale / softcap", "score_factor = scale"),
        change("slope of the group's first head", "Query heads of a group have one slope.",
               SLOPE, SLOPE.replace("+ head", "+ (kv_head * group_size + 0 * head)")),
        change("slope of the first sequence", "All sequences have the slopes of one.",
               SLOPE, SLOPE.replace("sequence * stride_slopes_b", "0")),
        change("slope of the wrong sign", "The bias of far keys has the wrong sign.",
               "s -= slope_log2[:, None]", "s += slope_log2[:, None]"),
        change("slope of rows", "Distances are counted in rows of a tile.",
               "position_numbers = positions", "position_numbers = (row_offsets + diagonal)"),
        change("distance within a block", "Distances begin anew with each block of keys.",
               "(position_numbers - start)", "position_numbers"),
    )  # fmt: skip
    return mutants_of(size.decoding(softcap=True, alibi=True), changes)


def biases(size: Size) -> tuple[Mutant, ...]:
    """Numbers that are added to scores, without a mask."""
    add = "s = s * score_scale + bias_tile.to(tl.float32)"
    changes = (
        change("bias of the group's first head", "Query heads of a group have one bias.",
               BIAS_ROWS, BIAS_ROWS.replace("+ head", "+ kv_head * group_size")),
        change("bias of the first sequence", "All sequences have the bias of one.",
               BIAS_ROWS, BIAS_ROWS.replace("sequence.to(tl.int64)", "0")),
        change("bias of the first query", "It is broadcast over queries.",
               BIAS_ROWS, BIAS_ROWS.replace("queries *", "queries * 0 *")),
        change("bias in units of log2", "The bias is too large.", add, add + " * LOG2_E"),
        change("parts of large scores count alike", "Parts are not weighted by their sums.",
               "weights *= tl.load(", "weights *= 1.0 + 0.0 * tl.load("),
        change("rows that a bias hides shifted by -inf", "A row whose keys are all hidden turns NaN.",
               'shift = tl.where(new_max == float("-inf"), 0.0, new_max)', "shift = new_max"),
        change("tail of K unmasked", "The last key counts once for each place behind it.",
               "visible = (keys < seqlen_kv)[None, :]", "visible = (keys >= 0)[None, :]"),
        change("tail one key too long", "The last key counts twice where the last block is not whole.",
               "visible = (keys < seqlen_kv)[None, :]", "visible = (keys < seqlen_kv + 1)[None, :]"),
    )  # fmt: skip
    return mutants_of(size.decoding(bias=Bias.ADDITIVE, causal=Causal.NONE), changes)


def sinks(size: Size) -> tuple[Mutant, ...]:
    """A score of each head that has no value, in several parts."""
    kept = "running_sum * kept + tl.exp2(sink_log2 - shift)"
    changes = (
        change("sink in every part", "It takes its weight once for each part.",
               'sink_log2 = tl.where(split == 0, sink_log2, float("-inf"))', "pass"),
        change("sink in no part", "It takes no weight.",
               "tl.where(split == 0, sink_log2", "tl.where(split == splits, sink_log2"),
        change("sink of the group's first head", "Query heads of a group have one sink.",
               SINK, SINK.replace("head", "kv_head * group_size + row_offsets * 0")),
        change("sink scaled", "It is scaled as the scores are.",
               SINK, SINK.replace("LOG2_E", "scale * LOG2_E")),
        change("outputs not rescaled for the sink", "Outputs keep a scale that the sink has left behind.",
               "accumulator * kept[:, None]", "accumulator"),
        change("sum not rescaled for the sink", "The sum of weights keeps it.",
               kept, kept.replace("running_sum * kept", "running_sum")),
        change("part's lse without the sink", "The part with the sink weighs as if it had none.",
               "running_max = largest", "pass"),
    )  # fmt: skip
    return mutants_of(size.decoding(sinks=True), changes)


def bytes_of(size: Size) -> tuple[Mutant, ...]:
    """How stored bytes become numbers beside queries of 16 bits: a GPU's own instructions."""
    pages = {"page_size": SMALL_PAGE, "kv_scale": KvScale.PAGE, "kv_dtype": KvDtype.INT8}
    wide = {"head_dim": PAIRED, "value_head_dim": PAIRED}
    row_scale = "row_scale = tl.maximum(scale_log2 * q_factor, 1e-37)"
    paired = (
        change("int8 pairs: odd columns for even ones", "Halves of pairs trade places.",
               "prmt.b32 $0, turned, 0x64646464, 0x4240; prmt.b32 $1, turned, 0x64646464, 0x4341",
               "prmt.b32 $1, turned, 0x64646464, 0x4240; prmt.b32 $0, turned, 0x64646464, 0x4341"),
        change("int8 pairs: sign not turned", "Negative numbers are taken for large ones.",
               "0x80808080", "0x00000000"),
        change("int8 pairs: numbers too large by 128", "The offset of 128 is not subtracted.",
               "offset, 0x64806480", "offset, 0x64006400"),
        change("queries not lowered", "The factor of the queries stays in the scores.",
               row_scale, row_scale.replace("scale_log2 * q_factor", "scale_log2 + 0.0 * q_factor")),
        change("weights not raised again", "Outputs lack the divisor of the weights.",
               "product * weight_factor[:, None]", "product", 2),
        change("even columns twice", "Odd columns of outputs are the even ones.",
               "tl.interleave(accumulator_even, accumulator_odd)",
               "tl.interleave(accumulator_even, accumulator_even)"),
        change("odd columns of keys left out", "Scores are made of every other column.",
               "tl.dot(q_tile_odd, k_tile_odd.T, s)", "s + 0.0 * tl.dot(q_tile_odd, k_tile_odd.T)"),
    )  # fmt: skip
    floats = (
        change("e4m3 pairs: columns one byte apart", "Pairs are taken for halves.", "0, 0x3120", "0, 0x3210"),
        change("e4m3 pairs: queries not lowered", "The factor of the queries stays in the scores.",
               row_scale, row_scale.replace("scale_log2 * q_factor", "scale_log2 + 0.0 * q_factor")),
    )  # fmt: skip
    single = (
        change("int8: bytes of a word swapped", "Columns of a word trade places.",
               "0x64646464, 0x4140", "0x64646464, 0x4041"),
        change("int8: numbers too large by 128", "The offset of 128 is not subtracted.",
               "offset, 0x64806480", "offset, 0x64006400"),
    )  # fmt: skip
    narrow = {"head_dim": SINGLE, "value_head_dim": SINGLE}
    return (
        *mutants_of(size.decoding(**pages, **wide), paired),
        *mutants_of(size.decoding(kv_dtype=KvDtype.E4M3, kv_scale=KvScale.HEAD, **wide), floats),
        *mutants_of(size.decoding(kv_dtype=KvDtype.INT8, kv_scale=KvScale.HEAD, **narrow), single),
    )


def early(size: Size) -> tuple[Mutant, ...]:
    """Kernels that are launched before the preceding kernel ends, and read or write without a wait."""
    combining = (
        change("parts not waited for", "Parts are combined before they are written.",
               "tl.extra.cuda.gdc_wait()", "pass"),
    )  # fmt: skip
    starting = (
        change("preceding kernel not waited for", "Inputs are read, and parts written, before it ends.",
               f"{WAIT}\n# The tile of rows", "# The tile of rows"),
        Change("queries not waited for", "Queries are read before the preceding kernel has written them.",
               (Patch(f"{WAIT}\n# The tile of rows", "# The tile of rows"),
                Patch(FIRST_KEY, f"{WAIT}\n{FIRST_KEY}"))),
        change("outputs combined without a wait", "Parts are combined before they are written.",
               f"{WAIT}\n# [SPLIT_TILE]", "# [SPLIT_TILE]"),
    )  # fmt: skip
    mutants = (
        *mutants_of(size.decoding({"early_combine": True}), combining),
        *mutants_of(size.decoding({"early_combine": True, "early_start": True}), starting),
    )
    return tuple(mutant._replace(racy=True) for mutant in mutants)
