"""Mutants of MLA Hopper kernels with wrong addresses or combination of splits."""

from tests.mutants.core import Mutant, Patch, mutants_of
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
    return (
        *mutants_of(WHOLE, (
            ("rest of queries from the values' columns",
             "position, 512], queries.full", "position, 448], queries.full"),
            ("rest of keys from the values' columns",
             "first_row, 512], rest.full", "first_row, 448], rest.full"),
            ("rest left out", SCORES_OF_REST, "accumulator, weights", LATER_BLOCKS),
            ("left half of queries twice",
             (Patch("queries.tiles.index(1)", "queries.tiles.index(0)", None, 2),
              Patch("anew + 1", "anew"))),
            ("left half of keys twice", "first_row, HALF], right.full", "first_row, 0], right.full"),
            ("left half of the output twice", "1 * HALF], room", "0 * HALF], room"),
        )),
        *mutants_of(NARROW, (
            ("narrow: rest of keys from the values' columns",
             "first_row, 128], rest.full", "first_row, 112], rest.full"),
        )),
        *mutants_of(FULL, (
            # Later blocks' last columns are read at the end of the keys.
            ("rest of the first block for all",
             "FAR - rows + first_row, 512], rest.full", "FAR - rows + (end - 1) * BLOCK_N, 512], rest.full"),
        )),
        *mutants_of(PARTS, (
            ("parts: left half twice", "columns = 1 * HALF", "columns = 0 * HALF"),
        )),
    )  # fmt: skip


def keys() -> tuple[Mutant, ...]:
    """Which keys, pages and lengths are read, and which rows are written."""
    of_rows = "gl.minimum(seqlen_kv - block * BLOCK_N + first_row, PAGE)"
    exist = "(lse_heads < tiling.heads) & "
    sequences = "(gl.num_programs(0) // tiling.tiles // tiling.splits)"
    next_page = "pages + gl.maximum(block - 1, 0) * BLOCK_N // PAGE"
    return (
        *mutants_of(FULL, (
            ("keys of the first sequence",
             "= sequence, block * BLOCK_N, seqlen_kv", "= 0, block * BLOCK_N, seqlen_kv"),
        )),
        *mutants_of(LENGTHS, (
            ("lengths of the first sequence",
             "gl.load(tiling.seqlens_kv + sequence)", "gl.load(tiling.seqlens_kv)"),
            ("rows behind the last key",
             "block * BLOCK_N, seqlen_kv\n", "block * BLOCK_N, (block + 1) * BLOCK_N\n", PRODUCER),
        )),
        *mutants_of(PARTS, (
            ("pages of the first sequence",
             "block_table + sequence.to(gl.int64) * tiling.stride_table", "block_table"),
            ("pages of the next sequence",
             "sequence.to(gl.int64) * tiling.stride_table",
             f"((sequence + 1) % {sequences}).to(gl.int64) * tiling.stride_table"),
            ("pages a block late", next_page, next_page.replace("block - 1", "block")),
            ("rows behind the last key of a page", of_rows, "PAGE"),
        )),
        *mutants_of(LARGE_PAGES, (
            ("larger pages: first block twice", "first_row = block * BLOCK_N % PAGE", "first_row = 0"),
            ("larger pages: keys of a page counted in its block",
             of_rows, of_rows.replace(" + first_row", "")),
        )),
        *mutants_of(SMALL_PAGES, (
            ("small pages: third page twice", "first_key // PAGE + 3", "first_key // PAGE + 2", None, 2),
            ("small pages: rows of the first page for the second",
             "gl.minimum(rows - 16, PAGE)", "gl.minimum(rows, PAGE)"),
            ("small pages: last page over the third",
             "tile.slice(48, PAGE, 3)", "tile.slice(32, PAGE, 3)", None, 3),
            ("small pages: a page that is not full not looked up",
             "first_key + 48 < seqlen_kv", "first_key + 63 < seqlen_kv", None, 2),
        )),
        *mutants_of(WHOLE, (
            ("heads of the first tile", "head = tile % head_tiles * HEADS", "head = tile * 0"),
            ("tiles of queries one apart",
             "position = tile // head_tiles * POSITIONS", "position = tile // head_tiles"),
            ("lse of the first sequence",
             "lse_rows = (sequence * tiling.heads + lse_heads)", "lse_rows = lse_heads"),
            # Rows without a head write the next sequence's log-sum-exp.
            ("lse beyond the heads", exist, ""),
            ("lse beyond the queries", " & (lse_positions < tiling.seqlen_q)", ""),
            ("output of the last tile not written",
             "return (tiles * batch,)", "return (tiles * batch - (batch > 1),)", PLAN),
        )),
    )  # fmt: skip


def parts() -> tuple[Mutant, ...]:
    """Which blocks are whose, and how parts become one."""
    begin, end = "begin = split * blocks // tiling.splits", "end = (split + 1) * blocks // tiling.splits"
    return mutants_of(PARTS, (
        ("overlap", begin, "begin = split * (blocks // tiling.splits)"),
        ("last blocks left out", end, "end = gl.maximum((split + 1) * (blocks // tiling.splits), begin)"),
        ("written over one another",
         "((split * tiling.all_heads + sequence * tiling.heads)", "((sequence * tiling.heads)", None, 2),
        ("log-sum-exps a sequence apart",
         "split * tiling.all_heads * tiling.seqlen_q + lse_rows",
         "split * tiling.heads * tiling.seqlen_q + lse_rows"),
        ("rows beyond the heads", "row_exists = (row_heads < tiling.heads) &", "row_exists =", None, 2),
        ("log-sum-exps in natural units",
         "row_lse = row_max + gl.log2(row_sum)",
         "row_lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453"),
        ("all alike", "tl.exp2(part_lse - shift)", 'tl.where(part_lse > float("-inf"), 1.0, 0.0)'),
        ("natural exponentials", "tl.exp2(part_lse", "tl.exp(part_lse"),
        ("the last one left out", "mask=parts < splits,", "mask=parts < splits - 1,"),
        ("one too many", "mask=parts < splits,", "mask=parts <= splits,"),
        ("empty rows shifted by -inf",
         'shift = tl.where(largest == float("-inf"), 0.0, largest)', "shift = largest"),
        ("empty rows divided by zero", "tl.where(total == 0.0, 1.0, total)", "total"),
        ("by the strides of queries",
         "% heads * stride_oh + row % seqlen_q * stride_os",
         "% heads * stride_os + row % seqlen_q * stride_oh"),
        ("in the first sequence", "to(tl.int64) * stride_ob", "to(tl.int64)"),
        ("lse in base 2", "* 0.6931471805599453)", "* 1.0)"),
        ("last row left out", "return (rows, 1)", "return (rows - (rows > 1), 1)", PLAN_OF_PARTS),
    ), prefix="parts: ")  # fmt: skip
