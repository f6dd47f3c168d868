"""Mutants of MLA Hopper kernels with wrong addresses or combination of splits."""

from __future__ import annotations

from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import only
from tests.mutants.latent_decode.latent import (
    FULL,
    LARGE_PAGES,
    LATER_BLOCKS,
    LENGTHS,
    NARROW,
    PARTS,
    PLAN,
    PLAN_OF_PARTS,
    PRODUCER,
    SMALL_PAGES,
    WHOLE,
)

SCORES_OF_REST = (
    "scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)\naccumulator, weights"
)


def columns() -> tuple[Mutant, ...]:
    """Halves of values, and what of a key only scores need."""
    return mutants_of((
        ("rest of queries from the values' columns", "Keys' last columns meet others of the queries.", WHOLE,
         only("position, 512], queries.full", "position, 448], queries.full")),
        ("rest of keys from the values' columns", "Queries' last columns meet others of the keys.", WHOLE,
         only("first_row, 512], rest.full", "first_row, 448], rest.full")),
        ("narrow: rest of keys from the values' columns", "So of values of 128 columns.", NARROW,
         only("first_row, 128], rest.full", "first_row, 112], rest.full")),
        ("rest left out", "Scores of all blocks but the first come of the values' columns alone.", WHOLE,
         only(SCORES_OF_REST, "accumulator, weights", LATER_BLOCKS)),
        ("rest of the first block for all",
         "Later blocks' last columns are read at the end of the keys.", FULL,
         only("FAR - rows + first_row, 512], rest.full",
              "FAR - rows + (end - 1) * BLOCK_N, 512], rest.full")),
        ("left half of queries twice", "Right halves of keys meet left ones of queries.", WHOLE,
         (Patch("queries.tiles.index(1)", "queries.tiles.index(0)", times=2), Patch("anew + 1", "anew"))),
        ("left half of keys twice", "The right half of keys and values is the left one.", WHOLE,
         only("first_row, HALF], right.full", "first_row, 0], right.full")),
        ("left half of the output twice", "The right half of the output is written over the left one.", WHOLE,
         only("1 * HALF], room", "0 * HALF], room")),
        ("parts: left half twice", "A part's right half is written over its left one.", PARTS,
         only("columns = 1 * HALF", "columns = 0 * HALF")),
    ))  # fmt: skip


def keys() -> tuple[Mutant, ...]:
    """Which keys, pages and lengths are read, and which rows are written."""
    of_rows = "gl.minimum(seqlen_kv - block * BLOCK_N + first_row, PAGE)"
    exist = "(lse_heads < tiling.heads) & "
    next_page = "pages + gl.maximum(block - 1, 0) * BLOCK_N // PAGE"
    return mutants_of((
        ("keys of the first sequence", "All sequences meet the keys of one.", FULL,
         only("= sequence, block * BLOCK_N, seqlen_kv", "= 0, block * BLOCK_N, seqlen_kv")),
        ("lengths of the first sequence", "All sequences count as long as one.", LENGTHS,
         only("gl.load(tiling.seqlens_kv + sequence)", "gl.load(tiling.seqlens_kv)")),
        ("rows behind the last key", "Rows after a sequence's keys are copied too.", LENGTHS,
         only("block * BLOCK_N, seqlen_kv\n", "block * BLOCK_N, (block + 1) * BLOCK_N\n", PRODUCER)),
        ("pages of the first sequence", "All sequences look their keys up in one's table.", PARTS,
         only("block_table + sequence.to(gl.int64) * tiling.stride_table", "block_table")),
        ("pages of the next sequence", "Sequences look their keys up in the next one's table.", PARTS,
         only("sequence.to(gl.int64) * tiling.stride_table",
              "((sequence + 1) % (gl.num_programs(0) // tiling.tiles // tiling.splits))"
              ".to(gl.int64) * tiling.stride_table")),
        ("pages a block late", "A block's page is that of the block that came before it.", PARTS,
         only(next_page, next_page.replace("block - 1", "block"))),
        ("rows behind the last key of a page", "Rows after a sequence's keys are copied too.", PARTS,
         only(of_rows, "PAGE")),
        ("larger pages: first block twice", "All blocks of a page are its first.", LARGE_PAGES,
         only("first_row = block * BLOCK_N % PAGE", "first_row = 0")),
        ("larger pages: keys of a page counted in its block",
         "A page's later blocks end too early.", LARGE_PAGES,
         only(of_rows, of_rows.replace(" + first_row", ""))),
        ("small pages: third page twice", "The last page of a block is the one before it.", SMALL_PAGES,
         only("first_key // PAGE + 3", "first_key // PAGE + 2", times=2)),
        ("small pages: rows of the first page for the second",
         "A block's second page seems fuller than it is.",
         SMALL_PAGES, only("gl.minimum(rows - 16, PAGE)", "gl.minimum(rows, PAGE)")),
        ("small pages: last page over the third",
         "Two pages of a block are copied to one place.", SMALL_PAGES,
         only("tile.slice(48, PAGE, 3)", "tile.slice(32, PAGE, 3)", times=3)),
        ("small pages: a page that is not full not looked up",
         "The last rows of a sequence are read elsewhere.",
         SMALL_PAGES, only("first_key + 48 < seqlen_kv", "first_key + 63 < seqlen_kv", times=2)),
        ("heads of the first tile", "All tiles of heads are the first.", WHOLE,
         only("head = tile % head_tiles * HEADS", "head = tile * 0")),
        ("tiles of queries one apart", "Tiles of queries overlap.", WHOLE,
         only("position = tile // head_tiles * POSITIONS", "position = tile // head_tiles")),
        ("lse of the first sequence", "Log-sum-exps of all sequences are written to one.", WHOLE,
         only("lse_rows = (sequence * tiling.heads + lse_heads)", "lse_rows = lse_heads")),
        ("lse beyond the heads", "Rows without a head write the next sequence's log-sum-exp.", WHOLE,
         only(exist, "")),
        ("lse beyond the queries", "Rows without a query write the next head's log-sum-exp.", WHOLE,
         only(" & (lse_positions < tiling.seqlen_q)", "")),
        ("output of the last tile not written", "The last program is not launched.", WHOLE,
         only("return (tiles * batch,)", "return (tiles * batch - (batch > 1),)", PLAN)),
    ))  # fmt: skip


def parts() -> tuple[Mutant, ...]:
    """Which blocks are whose, and how parts become one."""
    begin, end = "begin = split * blocks // tiling.splits", "end = (split + 1) * blocks // tiling.splits"
    changes = (
        ("overlap",
         "Where parts are not alike some blocks count twice.", begin,
         "begin = split * (blocks // tiling.splits)"),
        ("last blocks left out", "Blocks that remain after the division among parts are skipped.",
         end, "end = gl.maximum((split + 1) * (blocks // tiling.splits), begin)"),
        ("written over one another", "All parts are written where the first lies.",
         Patch("((split * tiling.all_heads + sequence * tiling.heads)",
               "((sequence * tiling.heads)", times=2), ""),
        ("log-sum-exps a sequence apart", "Those of parts overlap where there are several sequences.",
         "split * tiling.all_heads * tiling.seqlen_q + lse_rows",
         "split * tiling.heads * tiling.seqlen_q + lse_rows"),
        ("rows beyond the heads", "Rows without a head overwrite those of the next sequence.",
         Patch("row_exists = (row_heads < tiling.heads) &", "row_exists =", times=2), ""),
        ("log-sum-exps in natural units", "Parts are weighed by powers of two of natural logarithms.",
         "row_lse = row_max + gl.log2(row_sum)",
         "row_lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453"),
        ("all alike", "Parts are averaged.", "tl.exp2(part_lse - shift)",
         'tl.where(part_lse > float("-inf"), 1.0, 0.0)'),
        ("natural exponentials", "Parts' weights are powers of e.", "tl.exp2(part_lse", "tl.exp(part_lse"),
        ("the last one left out", "It has no weight.", "mask=parts < splits,", "mask=parts < splits - 1,"),
        ("one too many",
         "Memory after the last part counts.", "mask=parts < splits,", "mask=parts <= splits,"),
        ("empty rows shifted by -inf", "Rows that no part saw a key of are NaN.",
         'shift = tl.where(largest == float("-inf"), 0.0, largest)', "shift = largest"),
        ("empty rows divided by zero", "Rows that no part saw a key of are NaN.",
         "tl.where(total == 0.0, 1.0, total)", "total"),
        ("by the strides of queries", "Heads are written where queries lie.",
         "% heads * stride_oh + row % seqlen_q * stride_os",
         "% heads * stride_os + row % seqlen_q * stride_oh"),
        ("in the first sequence",
         "All sequences' rows are written to one.", "to(tl.int64) * stride_ob", "to(tl.int64)"),
        ("lse in base 2", "The log-sum-exp is in units of log2.", "* 0.6931471805599453)", "* 1.0)"),
        ("last row left out", "It is not put together.",
         Patch("return (rows, 1)", "return (rows - (rows > 1), 1)", PLAN_OF_PARTS), ""),
    )  # fmt: skip
    return mutants_of(
        (f"parts: {name}", breaks, PARTS, (old,) if isinstance(old, Patch) else only(old, new))
        for name, breaks, old, new in changes
    )
