"""Mutants of the decoding family: splits, their combination, and the rows of a tile."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.serving_size import Size

FIRST = "first = split * blocks // splits * BLOCK_N"
LAST = "last = (split + 1) * blocks // splits * BLOCK_N"
PART_LSE = "row_lse = running_max + tl.log2(running_sum)"
PART_PLACES = "(sequence * seqlen_q + queries) * heads + head"
COMBINED = "tl.sum(part_out * weights[:, None], 0)"
TOTAL = "tl.where(total == 0.0, 1.0, total)"
LSE = "(shift + tl.log2(total)) * LN_2"
LAST_PLACE = "last_position = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group_size, seqlen_q - 1)"


def parts(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (*bounds(size), *combining(size), *rows(size), *softmax(size))


def bounds(size: Size) -> tuple[Mutant, ...]:
    """Which blocks of keys a part has, and where it is put."""
    return mutants_of(size.decoding(), (
        ("remaining blocks skipped", LAST, "last = first + blocks // splits * BLOCK_N"),
        ("last block of a part skipped", LAST, f"{LAST} - BLOCK_N"),
        ("first block of a part skipped", FIRST, f"{FIRST} + BLOCK_N"),
        ("last block of the part before", FIRST, f"{FIRST} - tl.where(split * blocks < splits, 0, BLOCK_N)"),
        # Later blocks count once for each part before them.
        ("every part to the end", LAST, "last = blocks * BLOCK_N"),
        # Borders of parts are rounded up on one side.
        ("parts that begin where the next one does",
         FIRST, "first = tl.cdiv(split * blocks, splits) * BLOCK_N"),
        ("one part for all", FIRST, "first = 0"),
        ("last block skipped",
         "blocks = tl.cdiv(tl.maximum(n_max, 0), BLOCK_N)", "blocks = tl.maximum(n_max, 0) // BLOCK_N"),
        ("parts of the next tile", "tl.program_id(0) // tiles % splits", "tl.program_id(0) % splits"),
        ("parts of all queries in one place", PART_PLACES, PART_PLACES.replace(" + queries", "")),
        ("parts of all sequences in one place", PART_PLACES, PART_PLACES.replace("sequence *", "0 *")),
        ("parts overlap by a column",
         "out_rows.to(tl.int64) * VALUE_HEAD_DIM", "out_rows.to(tl.int64) * (VALUE_HEAD_DIM - 1)"),
        ("last tile of rows not computed",
         "tiles = triton.cdiv(seqlen_q * group_size, 16)", "tiles = max(1, seqlen_q * group_size // 16)"),
    ))  # fmt: skip


def combining(size: Size) -> tuple[Mutant, ...]:
    """Mutants of combining the parts of a row."""
    exists = "parts < splits"
    return mutants_of(size.decoding(kv_lengths=True, causal=Causal.NONE), (
        ("parts not weighted", COMBINED, "tl.sum(part_out, 0)"),
        ("parts averaged", TOTAL, "splits"),
        ("parts without their maximum",
         (Patch("tl.exp2(part_lse - shift)", "tl.exp2(part_lse)"),
          Patch(LSE, LSE.replace("shift + ", "")))),
        ("parts weighted by those of another head",
         "tl.load(partial_lse + part_rows", "tl.load(partial_lse + part_rows - head"),
        ("outputs of another head's parts",
         "partial_out + part_rows.to(tl.int64)[:, None]",
         "partial_out + (part_rows - head).to(tl.int64)[:, None]"),
        ("weights of the first part for all",
         COMBINED, COMBINED.replace("weights[", "tl.exp2(tl.load(partial_lse + row + parts * 0) - shift)[")),
        ("parts that are not there counted", 'other=float("-inf")', "other=0.0"),
        ("empty parts counted",
         PART_LSE, "row_lse = tl.where(running_sum == 0.0, 0.0, running_max + tl.log2(running_sum))"),
        ("last part left out", exists, f"{exists} - 1", None, 2),
        ("parts one row apart", "part_rows = parts * rows + row", "part_rows = parts * heads + row"),
        ("parts in natural units", PART_LSE, "row_lse = (running_max + tl.log2(running_sum)) * LN_2"),
        ("parts' lse without the sum",
         PART_LSE, "row_lse = tl.where(running_sum == 0.0, running_sum - 1e30, running_max)"),
        ("rows that no part saw divided by zero", TOTAL, "total"),
        ("rows that no part saw shifted by -inf",
         'shift = tl.where(largest == float("-inf"), 0.0, largest)', "shift = largest"),
        ("combined lse in base 2", LSE, LSE.removesuffix(" * LN_2")),
        ("combined lse of the largest part", LSE, "shift * LN_2"),
        ("outputs of the first query", "query * stride_os", "query * 0 * stride_os"),
        ("outputs of the first sequence", "sequence * stride_ob", "sequence * 0 * stride_ob"),
        ("lse by heads of queries",
         "(sequence * heads + head) * seqlen_q + query", "(sequence * seqlen_q + query) * heads + head"),
        ("last row not combined", "grid = (rows,", "grid = (rows - 1,"),
    ))  # fmt: skip


def rows(size: Size) -> tuple[Mutant, ...]:
    """Queries and the heads that share a KV head, in one tile, with nothing to combine."""
    head = "kv_head * group_size + row_offsets % group_size"
    end = "row_end = key_stop(positions,"
    lse = "lse + (sequence * heads + head) * seqlen_q + queries"
    return mutants_of(size.decoding({"num_splits": 1}), (
        ("diagonal one key too far", end, end.replace("positions", "positions + 1")),
        ("diagonal one key too short", end, end.replace("positions", "positions - 1")),
        ("rows masked as queries", "positions = queries + diagonal", "positions = row_offsets + diagonal"),
        ("all rows masked as the first",
         "positions = queries + diagonal", "positions = queries * 0 + diagonal"),
        ("keys up to the first query's",
         LAST_PLACE, LAST_PLACE.replace("tile * BLOCK_M + BLOCK_M - 1", "tile * BLOCK_M")),
        # A tile's rows are taken to be queries of one head.
        ("keys of a tile as of a whole one's rows",
         LAST_PLACE, LAST_PLACE.replace("(tile * BLOCK_M + BLOCK_M - 1) // group_size", "tile")),
        ("heads of groups in turn", head, "row_offsets % group_size * (heads // group_size) + kv_head"),
        ("first head of a group for all", head, "kv_head * group_size + row_offsets * 0"),
        ("keys of the first KV head", "kv_head * stride_kh", "kv_head * 0"),
        ("values of the first sequence", "v + sequence * stride_vb", "v + sequence * 0"),
        ("values by the strides of K", "slots[:, None] * stride_vs", "slots[:, None] * stride_ks"),
        ("values behind the last read", "slots = tl.minimum(keys, seqlen_kv - 1)", "slots = keys"),
        ("last row not written",
         "row_exists = row_offsets < seqlen_q * group_size",
         "row_exists = row_offsets < seqlen_q * group_size - 1"),
        ("lse of another head", lse, f"{lse} + seqlen_q"),
    ))  # fmt: skip


def softmax(size: Size) -> tuple[Mutant, ...]:
    """Maxima, sums and the log-sum-exp of a part."""
    single = "row_lse = (running_max + tl.log2(running_sum)) * LN_2"
    return mutants_of(size.decoding({"num_splits": 1}, kv_lengths=True), (
        ("accumulator not rescaled", "accumulator * rescale[:, None]", "accumulator"),
        ("sum not rescaled", "running_sum * rescale", "running_sum"),
        ("maximum not kept",
         "return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),
        ("rows without a key divided by zero",
         "tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
        ("rows without a key shifted by -inf",
         'shift = tl.where(new_max == float("-inf"), 0.0, new_max)', "shift = new_max"),
        ("scale twice", "scale_log2 = scale * LOG2_E", "scale_log2 = scale * scale * LOG2_E"),
        ("natural exponentials", "scale_log2 = scale * LOG2_E", "scale_log2 = scale"),
        ("lse in base 2", single, single.removesuffix(" * LN_2")),
        ("lse without the maximum", single, single.replace("running_max + ", "")),
    ))  # fmt: skip
