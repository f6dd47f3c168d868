"""Mutants of the decoding family: splits, their combination, and the rows of a tile."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, Patch
from tests.mutants.serving_size import Change, Size, change, mutants_of

FIRST = "first = split * blocks // splits * BLOCK_N"
LAST = "last = (split + 1) * blocks // splits * BLOCK_N"
PART_LSE = "row_lse = running_max + tl.log2(running_sum)"
PART_PLACES = "(sequence * seqlen_q + queries) * heads + head"
COMBINED = "tl.sum(part_out * weights[:, None], 0)"
TOTAL = "tl.where(total == 0.0, 1.0, total)"
LSE = "(shift + tl.log2(total)) * LN_2"
LAST_PLACE = "last_position = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group_size, seqlen_q - 1)"
COMBINE = Part("def combine(", "def launch_plan(")


def parts(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (*bounds(size), *combining(size), *rows(size), *softmax(size))


def bounds(size: Size) -> tuple[Mutant, ...]:
    """Which blocks of keys a part has, and where it is put."""
    changes = (
        change("remaining blocks skipped", "Parts have as many blocks as divide among them.",
               LAST, "last = first + blocks // splits * BLOCK_N"),
        change("last block of a part skipped", "Parts end a block early.", LAST, f"{LAST} - BLOCK_N"),
        change("first block of a part skipped", "Parts begin a block late.", FIRST, f"{FIRST} + BLOCK_N"),
        change("last block of the part before", "Blocks at a border of parts count twice.",
               FIRST, f"{FIRST} - tl.where(split * blocks < splits, 0, BLOCK_N)"),
        change("every part to the end", "Later blocks count once for each part before them.",
               LAST, "last = blocks * BLOCK_N"),
        change("parts that begin where the next one does", "Borders of parts are rounded up on one side.",
               FIRST, "first = tl.cdiv(split * blocks, splits) * BLOCK_N"),
        change("one part for all", "All parts are the first.", FIRST, "first = 0"),
        change("last block skipped", "A last block of keys that is not whole is left out.",
               "blocks = tl.cdiv(tl.maximum(n_max, 0), BLOCK_N)",
               "blocks = tl.maximum(n_max, 0) // BLOCK_N"),
        change("parts of the next tile", "Parts are counted as tiles are.",
               "tl.program_id(0) // tiles % splits", "tl.program_id(0) % splits"),
        change("parts of all queries in one place", "All queries of a sequence write the first one's parts.",
               PART_PLACES, PART_PLACES.replace(" + queries", "")),
        change("parts of all sequences in one place", "All sequences write the first one's parts.",
               PART_PLACES, PART_PLACES.replace("sequence *", "0 *")),
        change("parts overlap by a column", "Outputs of parts lie a column too near.",
               "out_rows.to(tl.int64) * VALUE_HEAD_DIM", "out_rows.to(tl.int64) * (VALUE_HEAD_DIM - 1)"),
        change("last tile of rows not computed", "Rows that fill no tile are left out.",
               "tiles = triton.cdiv(seqlen_q * group_size, 16)",
               "tiles = max(1, seqlen_q * group_size // 16)"),
    )  # fmt: skip
    return mutants_of(size.decoding(), changes)


def combining(size: Size) -> tuple[Mutant, ...]:
    """What becomes of the parts of a row."""
    exists = "parts < splits"
    changes = (
        change("parts not weighted", "Parts count alike, whatever weight their keys have.",
               COMBINED, "tl.sum(part_out, 0)"),
        change("parts averaged", "The sum of parts is divided by how many there are.", TOTAL, "splits"),
        Change("parts without their maximum", "Weights of parts under- and overflow.",
               (Patch("tl.exp2(part_lse - shift)", "tl.exp2(part_lse)"),
                Patch(LSE, LSE.replace("shift + ", "")))),
        change("parts weighted by those of another head", "Weights are those of the token's first head.",
               "tl.load(partial_lse + part_rows", "tl.load(partial_lse + part_rows - head"),
        change("outputs of another head's parts", "Parts are those of the token's first head.",
               "partial_out + part_rows.to(tl.int64)[:, None]",
               "partial_out + (part_rows - head).to(tl.int64)[:, None]"),
        change("weights of the first part for all", "Parts count as the first one does.",
               COMBINED,
               COMBINED.replace("weights[", "tl.exp2(tl.load(partial_lse + row + parts * 0) - shift)[")),
        change("parts that are not there counted", "A part that does not exist has a weight.",
               'other=float("-inf")', "other=0.0"),
        change("empty parts counted", "A part that saw no key has the weight of a score of zero.",
               PART_LSE, "row_lse = tl.where(running_sum == 0.0, 0.0, running_max + tl.log2(running_sum))"),
        change("last part left out", "The last part has no weight.", exists, f"{exists} - 1", 2),
        change("parts one row apart", "The parts of a row are those of the next rows.",
               "part_rows = parts * rows + row", "part_rows = parts * heads + row"),
        change("parts in natural units", "Powers of two are taken of the parts' natural logarithms.",
               PART_LSE, "row_lse = (running_max + tl.log2(running_sum)) * LN_2"),
        change("parts' lse without the sum", "Parts are weighted by their maxima.",
               PART_LSE, "row_lse = tl.where(running_sum == 0.0, running_sum - 1e30, running_max)"),
        change("rows that no part saw divided by zero", "A row that sees no key is NaN.", TOTAL, "total"),
        change("rows that no part saw shifted by -inf", "A row that sees no key is NaN.",
               'shift = tl.where(largest == float("-inf"), 0.0, largest)', "shift = largest"),
        change("combined lse in base 2", "The log-sum-exp is in units of log2.",
               LSE, LSE.removesuffix(" * LN_2")),
        change("combined lse of the largest part", "The log-sum-exp lacks the sum.", LSE, "shift * LN_2"),
        change("outputs of the first query", "Outputs of all queries are written to one.",
               "query * stride_os", "query * 0 * stride_os"),
        change("outputs of the first sequence", "Outputs of all sequences are written to one.",
               "sequence * stride_ob", "sequence * 0 * stride_ob"),
        change("lse by heads of queries", "The log-sum-exp is written with heads inside of queries.",
               "(sequence * heads + head) * seqlen_q + query",
               "(sequence * seqlen_q + query) * heads + head"),
        change("last row not combined", "The last head of the last query is left out.",
               "grid = (rows,", "grid = (rows - 1,"),
    )  # fmt: skip
    return mutants_of(size.decoding(kv_lengths=True, causal=Causal.NONE), changes)


def rows(size: Size) -> tuple[Mutant, ...]:
    """Queries and the heads that share a KV head, in one tile, with nothing to combine."""
    head = "kv_head * group_size + row_offsets % group_size"
    end = "row_end = key_stop(positions,"
    lse = "lse + (sequence * heads + head) * seqlen_q + queries"
    changes = (
        change("diagonal one key too far", "Every query sees the key after its last one.",
               end, end.replace("positions", "positions + 1")),
        change("diagonal one key too short", "No query sees its last key.",
               end, end.replace("positions", "positions - 1")),
        change("rows masked as queries", "Heads of a group stand one behind the other.",
               "positions = queries + diagonal", "positions = row_offsets + diagonal"),
        change("all rows masked as the first", "All queries of a tile see the keys of the first one.",
               "positions = queries + diagonal", "positions = queries * 0 + diagonal"),
        change("keys up to the first query's", "Keys that only later queries of a tile see are left out.",
               LAST_PLACE, LAST_PLACE.replace("tile * BLOCK_M + BLOCK_M - 1", "tile * BLOCK_M")),
        change("keys of a tile as of a whole one's rows",
               "A tile's rows are taken to be queries of one head.",
               LAST_PLACE, LAST_PLACE.replace("(tile * BLOCK_M + BLOCK_M - 1) // group_size", "tile")),
        change("heads of groups in turn", "Tiles hold query heads of other groups.",
               head, "row_offsets % group_size * (heads // group_size) + kv_head"),
        change("first head of a group for all", "All heads of a group are the first.",
               head, "kv_head * group_size + row_offsets * 0"),
        change("keys of the first KV head", "All query heads meet the keys of one KV head.",
               "kv_head * stride_kh", "kv_head * 0"),
        change("values of the first sequence", "All sequences meet the values of one.",
               "v + sequence * stride_vb", "v + sequence * 0"),
        change("values by the strides of K", "Rows of V are looked for where those of K would lie.",
               "slots[:, None] * stride_vs", "slots[:, None] * stride_ks"),
        change("values behind the last read", "Rows behind the last value are weighted with zero.",
               "slots = tl.minimum(keys, seqlen_kv - 1)", "slots = keys"),
        change("last row not written", "The last head of the last query is left out.",
               "row_exists = row_offsets < seqlen_q * group_size",
               "row_exists = row_offsets < seqlen_q * group_size - 1"),
        change("lse of another head", "The log-sum-exp is written where the next head's lies.",
               lse, f"{lse} + seqlen_q"),
    )  # fmt: skip
    return mutants_of(size.decoding({"num_splits": 1}), changes)


def softmax(size: Size) -> tuple[Mutant, ...]:
    """Maxima, sums and the log-sum-exp of a part."""
    single = "row_lse = (running_max + tl.log2(running_sum)) * LN_2"
    changes = (
        change("accumulator not rescaled", "Outputs keep a scale that the maximum has left behind.",
               "accumulator * rescale[:, None]", "accumulator"),
        change("sum not rescaled", "The sum of weights keeps a scale that the maximum has left behind.",
               "running_sum * rescale", "running_sum"),
        change("maximum not kept", "The running maximum falls where it should rise.",
               "return p, rescale, new_max,", "return p, rescale, tl.minimum(running_max, new_max),"),
        change("rows without a key divided by zero", "A row that sees no key is NaN.",
               "tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
        change("rows without a key shifted by -inf", "A row that has seen no key yet turns NaN.",
               'shift = tl.where(new_max == float("-inf"), 0.0, new_max)', "shift = new_max"),
        change("scale twice", "Scores are scaled by the square of the scale.",
               "scale_log2 = scale * LOG2_E", "scale_log2 = scale * scale * LOG2_E"),
        change("natural exponentials", "Powers of two are taken of scores in natural units.",
               "scale_log2 = scale * LOG2_E", "scale_log2 = scale"),
        change("lse in base 2", "The log-sum-exp is in units of log2.",
               single, single.removesuffix(" * LN_2")),
        change("lse without the maximum", "The log-sum-exp lacks the maximum of the scores.",
               single, single.replace("running_max + ", "")),
    )  # fmt: skip
    return mutants_of(size.decoding({"num_splits": 1}, kv_lengths=True), changes)
