"""Mutants of the decoding family: packed tokens, pages, latent keys and caches of 8 bits."""

from __future__ import annotations

from flashtune.core.problem import Dtype, KvDtype, KvScale
from tests.mutants.core import Mutant
from tests.mutants.portable.head_factors import HEAD_SCALED, head_factors
from tests.mutants.serving_size import SMALL_PAGE, SMALL_PAGES_BLOCK, Size, change, mutants_of

TABLE = "block_table + sequence.to(tl.int64) * stride_table"
SLOTS = "slots = tl.minimum(keys, seqlen_kv - 1) % PAGE_SIZE"
NEXT_PAGE = "tl.minimum(start + BLOCK_N, seqlen_kv - 1)"
NEXT_PAGES = "tl.maximum(tl.minimum(key_offsets + (start + BLOCK_N), seqlen_kv - 1), 0)"
FIRST_PAGE = "tl.minimum(first, seqlen_kv - 1)"
KEYS_END = "tl.load(cu_seqlens_kv + sequence + 1) - first_key"


def caches(size: Size) -> tuple[Mutant, ...]:
    """All that run anywhere."""
    return (
        *packed(size),
        *paged(size),
        *latent(size),
        *head_factors(size.decoding(**HEAD_SCALED)),
        *page_factors(size),
    )


def packed(size: Size) -> tuple[Mutant, ...]:
    """Tokens of sequences one behind the other, and the parts of their keys."""
    begins = "mask=others < sequences, other=0) * group_size // BLOCK + others"
    count = "token_count = tl.load(cu_seqlens_q + sequences)"
    changes = (
        change("tokens one row late", "Queries and parts are those of the token behind.",
               "tokens = first_row + queries", "tokens = first_row + queries + 1"),
        change("parts at a sequence's tokens", "All sequences write their parts to the first tokens'.",
               "split * all_rows + tokens * heads", "split * all_rows + queries * heads"),
        change("first key of the next sequence seen", "A sequence has a key more than it has.",
               KEYS_END, f"{KEYS_END} + 1"),
        change("keys of the first sequence", "All sequences meet the keys of one.",
               "k + first_key.to(tl.int64)", "k + 0"),
        change("values begin one row late", "Weights meet the values behind their own.",
               "v + first_key.to", "v + (first_key + 1).to"),
        change("sequence of the tile before", "Sequences that begin by a tile are found a tile late.",
               "(begins <= tile) & (others < sequences)", "(begins < tile) & (others < sequences)"),
        change("tiles of tokens, not of rows", "Sequences are looked for as if each head had a tile.",
               begins, begins.replace(" * group_size", "")),
        change("tiles of a sequence counted from a row too far",
               "A sequence that begins in a tile begins in the next.",
               "tile -= first_row * group_size // BLOCK_M",
               "tile -= tl.cdiv(first_row * group_size, BLOCK_M)"),
        change("tokens one too few", "The last token's parts are not combined.", count, f"{count} - 1"),
        change("tokens one too many", "Parts of a token that is not there are combined.",
               count, f"{count} + 1"),
        change("tokens counted as rows", "Only some heads' parts are combined.",
               "row >= token_count * heads", "row >= token_count"),
        change("no room for the last tiles", "Sequences have no tile for their last, partial rows.",
               "group_size // 16 + sequences", "group_size // 16 + 1"),
    )  # fmt: skip
    return mutants_of(size.decoding(packed=6), changes)


def paged(size: Size) -> tuple[Mutant, ...]:
    """Pages that hold several blocks of keys, in several parts."""
    changes = (
        change("pages of another sequence", "A sequence's keys are those of the one before.",
               TABLE, TABLE.replace("sequence.to(tl.int64)", "tl.maximum(sequence - 1, 0)")),
        change("page of the block before", "Pages are never left.", "page = next_page", "pass"),
        change("page of the block behind", "The page that is loaded ahead is one block further.",
               NEXT_PAGE, NEXT_PAGE.replace("BLOCK_N", "2 * BLOCK_N")),
        change("parts begin in the first page",
               "The first block of every part is looked for in the first page.",
               FIRST_PAGE, FIRST_PAGE.replace("first", "0")),
        change("parts begin in the page of the next",
               "The first block of a part is looked for where the last ends.",
               FIRST_PAGE, FIRST_PAGE.replace("first", "last")),
        change("pages counted by blocks", "Every block of keys is looked for in a page of its own.",
               f"tl.maximum({NEXT_PAGE}, 0) // PAGE_SIZE", f"tl.maximum({NEXT_PAGE}, 0) // BLOCK_N"),
        change("tail of the last page read", "Values behind the last key are weighted with zero.",
               SLOTS, "slots = keys % PAGE_SIZE"),
        change("every block at its page's start", "Blocks of a page are all the first.",
               SLOTS, "slots = tl.minimum(key_offsets, seqlen_kv - 1) % PAGE_SIZE"),
        change("rows of a page one late", "Rows of a page are counted from the second.",
               SLOTS,
               SLOTS.replace("tl.minimum(keys, seqlen_kv - 1)", "(tl.minimum(keys, seqlen_kv - 1) + 1)")),
        change("values in pages of keys", "Pages of V lie as far apart as those of K.",
               "page.to(tl.int64) * stride_vb", "page.to(tl.int64) * stride_kb"),
        change("length of the next sequence", "A sequence has as many keys as the next.",
               "tl.load(seqlens_kv + sequence)", "tl.load(seqlens_kv + sequence + 1)"),
        change("length of the first sequence", "All sequences have as many keys as one.",
               "tl.load(seqlens_kv + sequence)", "tl.load(seqlens_kv)"),
    )  # fmt: skip
    return mutants_of(size.decoding(page_size=size.page), changes)


def latent(size: Size) -> tuple[Mutant, ...]:
    """Values that are the first columns of keys, in small pages."""
    values = size.block_n if size.dtype is Dtype.FP32 else 64
    behind = f"(columns_{values} + {values})[None, :]"
    rope = "tl.dot(q_tile_1, k_tile_1.T, s"
    changes = (
        change("rope part left out", "Scores are made of the columns that values have.",
               rope, "s + 0.0 * tl.dot(q_tile_1, k_tile_1.T"),
        change("rope part alone", "Scores are made of the columns that values lack.",
               rope, rope.removesuffix(", s")),
        change("queries' first columns twice", "Their rope part is their first columns.",
               rope, rope.replace("q_tile_1", "q_tile_0")),
        change("keys' first columns twice", "Their rope part is their first columns.",
               rope, rope.replace("k_tile_1", "v_tile")),
        change("rope part by the queries' columns", "It is read from where the first columns lie.",
               f"q_rows[:, None] + {behind}", f"q_rows[:, None] + columns_{values}[None, :]"),
        change("values are the rope part", "Weights meet the last columns of keys.",
               "tl.dot(p_low, v_tile,", "tl.dot(p_low, k_tile_1,"),
        change("pages looked up by the block", "A block is in the page of its first key alone.",
               NEXT_PAGES, NEXT_PAGES.replace("key_offsets", "key_offsets * 0")),
        change("page behind the last key looked up", "Unused entries of a block table are read.",
               NEXT_PAGES, "(key_offsets + (start + BLOCK_N))"),
    )  # fmt: skip
    subject = size.decoding(
        {"block_n": SMALL_PAGES_BLOCK, "num_splits": 2},
        mla=True, page_size=SMALL_PAGE, heads=8, kv_heads=1, head_dim=2 * values, value_head_dim=values,
    )  # fmt: skip
    return mutants_of(subject, changes)


def page_factors(size: Size) -> tuple[Mutant, ...]:
    """Scales of pages: of those that hold a part of a block, and of those that hold several."""
    of_k, of_v = (
        f"tl.load({letter}_scale_base + page.to(tl.int64) * stride_{letter}_scale_p)" for letter in "kv"
    )
    k_factor, v_factor = f"k_factor = {of_k}", f"v_factor = {of_v}"
    fields = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}
    small = (
        change("page scale of keys missing", "Keys count as their 8 bits say.",
               "s *= k_factor[None, :]", "pass"),
        change("page scale of keys by place", "Scales are looked for where the first pages' lie.",
               k_factor, k_factor.replace("page.to(tl.int64)", "(slots // PAGE_SIZE)")),
        change("page scale of values by the stride of keys'", "Scales of V lie as far apart as those of K.",
               v_factor, v_factor.replace("stride_v_scale_p", "stride_k_scale_p")),
        change("page scale of values is the keys'", "Values have the scales of their page's keys.",
               v_factor, f"v_factor = {of_k}"),
        change("page scale of values missing", "Values count as their 8 bits say.",
               "p *= v_factor[None, :]", "pass"),
        change("page scale of values in the sum", "The sum of weights is scaled as the values are.",
               "p *= v_factor[None, :]",
               "running_sum += tl.sum(p * v_factor[None, :] - p, 1)\np *= v_factor[None, :]"),
    )  # fmt: skip
    whole = (
        change("page scale of the block behind", "Values have the scale of the page behind theirs.",
               "product * v_factor",
               "product * tl.load(v_scale_base + next_page.to(tl.int64) * stride_v_scale_p)"),
        change("page scale on all values so far", "Values of earlier pages are scaled again with each block.",
               "accumulator * rescale[:, None] + product * v_factor",
               "(accumulator * rescale[:, None] + product) * v_factor"),
    )  # fmt: skip
    pages = size.decoding({"block_n": SMALL_PAGES_BLOCK, "num_splits": 2}, page_size=SMALL_PAGE, **fields)
    return (
        *mutants_of(pages, small),
        *mutants_of(size.decoding({"num_splits": 1}, page_size=size.page, **fields), whole),
    )
