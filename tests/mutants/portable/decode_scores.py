"""Mutants of the decoding family: masks, scores, and conversion of 8-bit values."""

from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale
from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.serving_size import FIRST_TOKENS, SMALL_PAGE, Size

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
    return (*windows(size), *chunks(size), *trees(size), *changed(size), *biases(size), *sinks(size))


def windows(size: Size) -> tuple[Mutant, ...]:
    """A window that leaves the first tokens visible."""
    return mutants_of(size.decoding(window_left=size.near, sink_tokens=FIRST_TOKENS), (
        ("window one key too far", START, START.replace("positions", "positions - 1")),
        ("window one key too short", START, START.replace("positions", "positions + 1")),
        ("window of the tile's first row",
         START, START.replace("positions", "positions * 0 + first_position")),
        ("first tokens one too many", LIFTED, LIFTED.replace("TOKENS", "TOKENS + 1")),
        ("first tokens one too few", LIFTED, LIFTED.replace("TOKENS", "TOKENS - 1")),
        ("first block of the window skipped",
         "n_min = first_start // BLOCK_N", "n_min = tl.cdiv(first_start, BLOCK_N)"),
        ("blocks of the first tokens skipped",
         LIFTED_STOP, LIFTED_STOP.replace("tl.cdiv(last_lifted, BLOCK_N)", "last_lifted // BLOCK_N")),
        ("blocks of the first tokens twice",
         LIFTED_STOP, "n_lifted = tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N"),
        ("keys between read for the window's", STEP, "start = step"),
        ("first tokens read as the window's", STEP, "start = step + skipped"),
    ))  # fmt: skip


def chunks(size: Size) -> tuple[Mutant, ...]:
    """Chunks, which a few queries lie in two of."""
    begin = "first_position = tile * BLOCK_M // group_size"
    return mutants_of(size.decoding(chunk=size.chunk), (
        ("chunk one query early", START, START.replace("positions", "tl.maximum(positions, 0) + 1")),
        ("chunk one query late", START, START.replace("positions", "positions - 1")),
        ("chunk without its first key", START, f"{START} + 1"),
        ("blocks of the last query's chunk",
         begin, "first_position = (tile * BLOCK_M + BLOCK_M - 1) // group_size"),
        ("parts of a band from the start", "tl.range(n_min + first, n_min + last,", "tl.range(first, last,"),
    ))  # fmt: skip


def trees(size: Size) -> tuple[Mutant, ...]:
    """A mask of the newest keys."""
    return mutants_of(size.decoding(tree=True), (
        ("tree of the first sequence", "sequence.to(tl.int64) * stride_tree_b", "sequence * 0"),
        ("tree one key earlier", "newest = seqlen_kv - seqlen_q", "newest = seqlen_kv - seqlen_q - 1"),
        ("tree of the first query", "queries * stride_tree_s", "queries * 0"),
        ("tree hidden", "visible &= tl.load(tree_rows", "tl.load(tree_rows"),
    ))  # fmt: skip


def changed(size: Size) -> tuple[Mutant, ...]:
    """Scores that are capped, and that distance is taken off."""
    capped = "return cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s * (2.0 * LOG2_E)))"
    if size.dtype is Dtype.FP32:
        capped = "return cap_log2 * tl.where(square < 0.16, s + s * square * series, steep)"
    hide = 's = tl.where(visible, s, float("-inf"))'
    return mutants_of(size.decoding(softcap=True, alibi=True), (
        ("cap left out", capped, "return cap_log2 * s"),
        # Hidden keys have the least score that there is, and some weight.
        ("cap after the mask", hide, "s = tl.where(visible, s, -cap_log2)"),
        ("cap not taken off first", "score_factor = scale / softcap", "score_factor = scale"),
        ("slope of the group's first head",
         SLOPE, SLOPE.replace("+ head", "+ (kv_head * group_size + 0 * head)")),
        ("slope of the first sequence", SLOPE, SLOPE.replace("sequence * stride_slopes_b", "0")),
        ("slope of the wrong sign", "s -= slope_log2[:, None]", "s += slope_log2[:, None]"),
        ("slope of rows", "position_numbers = positions", "position_numbers = (row_offsets + diagonal)"),
        ("distance within a block", "(position_numbers - start)", "position_numbers"),
    ))  # fmt: skip


def biases(size: Size) -> tuple[Mutant, ...]:
    """Numbers that are added to scores, without a mask."""
    add = "s = s * score_scale + bias_tile.to(tl.float32)"
    return mutants_of(size.decoding(bias=Bias.ADDITIVE, causal=Causal.NONE), (
        ("bias of the group's first head", BIAS_ROWS, BIAS_ROWS.replace("+ head", "+ kv_head * group_size")),
        ("bias of the first sequence", BIAS_ROWS, BIAS_ROWS.replace("sequence.to(tl.int64)", "0")),
        ("bias of the first query", BIAS_ROWS, BIAS_ROWS.replace("queries *", "queries * 0 *")),
        ("bias in units of log2", add, add + " * LOG2_E"),
        ("parts of large scores count alike", "weights *= tl.load(", "weights *= 1.0 + 0.0 * tl.load("),
        # A row whose keys are all hidden turns NaN.
        ("rows that a bias hides shifted by -inf",
         'shift = tl.where(new_max == float("-inf"), 0.0, new_max)', "shift = new_max"),
        # The last key counts once for each place behind it.
        ("tail of K unmasked", "visible = (keys < seqlen_kv)[None, :]", "visible = (keys >= 0)[None, :]"),
        # The last key counts twice where the last block is not whole.
        ("tail one key too long",
         "visible = (keys < seqlen_kv)[None, :]", "visible = (keys < seqlen_kv + 1)[None, :]"),
    ))  # fmt: skip


def sinks(size: Size) -> tuple[Mutant, ...]:
    """A score of each head that has no value, in several parts."""
    kept = "running_sum * kept + tl.exp2(sink_log2 - shift)"
    return mutants_of(size.decoding(sinks=True), (
        ("sink in every part", 'sink_log2 = tl.where(split == 0, sink_log2, float("-inf"))', "pass"),
        ("sink in no part", "tl.where(split == 0, sink_log2", "tl.where(split == splits, sink_log2"),
        ("sink of the group's first head",
         SINK, SINK.replace("head", "kv_head * group_size + row_offsets * 0")),
        ("sink scaled", SINK, SINK.replace("LOG2_E", "scale * LOG2_E")),
        ("outputs not rescaled for the sink", "accumulator * kept[:, None]", "accumulator"),
        ("sum not rescaled for the sink", kept, kept.replace("running_sum * kept", "running_sum")),
        ("part's lse without the sink", "running_max = largest", "pass"),
    ))  # fmt: skip


def bytes_of(size: Size) -> tuple[Mutant, ...]:
    """Mutants of converting stored bytes for queries of 16 bits, by a GPU's own instructions."""
    pages = {"page_size": SMALL_PAGE, "kv_scale": KvScale.PAGE, "kv_dtype": KvDtype.INT8}
    wide = {"head_dim": PAIRED, "value_head_dim": PAIRED}
    row_scale = "row_scale = tl.maximum(scale_log2 * q_factor, 1e-37)"
    narrow = {"head_dim": SINGLE, "value_head_dim": SINGLE}
    return (
        *mutants_of(size.decoding(**pages, **wide), (
            ("int8 pairs: odd columns for even ones",
             "prmt.b32 $0, turned, 0x64646464, 0x4240; prmt.b32 $1, turned, 0x64646464, 0x4341",
             "prmt.b32 $1, turned, 0x64646464, 0x4240; prmt.b32 $0, turned, 0x64646464, 0x4341"),
            ("int8 pairs: sign not turned", "0x80808080", "0x00000000"),
            ("int8 pairs: numbers too large by 128", "offset, 0x64806480", "offset, 0x64006400"),
            ("queries not lowered",
             row_scale, row_scale.replace("scale_log2 * q_factor", "scale_log2 + 0.0 * q_factor")),
            ("weights not raised again", "product * weight_factor[:, None]", "product", None, 2),
            ("even columns twice",
             "tl.interleave(accumulator_even, accumulator_odd)",
             "tl.interleave(accumulator_even, accumulator_even)"),
            ("odd columns of keys left out",
             "tl.dot(q_tile_odd, k_tile_odd.T, s)", "s + 0.0 * tl.dot(q_tile_odd, k_tile_odd.T)"),
        )),
        *mutants_of(size.decoding(kv_dtype=KvDtype.E4M3, kv_scale=KvScale.HEAD, **wide), (
            ("e4m3 pairs: columns one byte apart", "0, 0x3120", "0, 0x3210"),
            ("e4m3 pairs: queries not lowered",
             row_scale, row_scale.replace("scale_log2 * q_factor", "scale_log2 + 0.0 * q_factor")),
        )),
        *mutants_of(size.decoding(kv_dtype=KvDtype.INT8, kv_scale=KvScale.HEAD, **narrow), (
            ("int8: bytes of a word swapped", "0x64646464, 0x4140", "0x64646464, 0x4041"),
            ("int8: numbers too large by 128", "offset, 0x64806480", "offset, 0x64006400"),
        )),
    )  # fmt: skip


def early(size: Size) -> tuple[Mutant, ...]:
    """Kernels that are launched before the preceding kernel ends, and read or write without a wait."""
    tile = "# The tile of rows"
    return (
        *mutants_of(size.decoding({"early_combine": True}), (
            ("parts not waited for", WAIT, "pass"),
        ), racy=True),
        *mutants_of(size.decoding({"early_combine": True, "early_start": True}), (
            ("preceding kernel not waited for", f"{WAIT}\n{tile}", tile),
            ("queries not waited for",
             (Patch(f"{WAIT}\n{tile}", tile), Patch(FIRST_KEY, f"{WAIT}\n{FIRST_KEY}"))),
            ("outputs combined without a wait", f"{WAIT}\n# [SPLIT_TILE]", "# [SPLIT_TILE]"),
        ), racy=True),
    )  # fmt: skip
