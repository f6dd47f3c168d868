"""Mutants of the masked family: packed sequences, lengths, pages, scales of caches, heads and rows."""

from __future__ import annotations

from flashtune.core.problem import Causal, KvDtype, KvScale
from tests.mutants.core import Mutant, Part, Patch
from tests.mutants.portable.head_factors import HEAD_SCALED, head_factors
from tests.mutants.serving_size import SMALL_PAGE, SMALL_PAGES_BLOCK, Change, Size, change, mutants_of

LOOPS = 2
SEEN = "visible = (keys < seqlen_kv)[None, :]"
LENGTH = "seqlen_kv = tl.minimum(tl.load(seqlens_kv + sequence), seqlen_kv)"
KEYS_END = "tl.load(cu_seqlens_kv + sequence + 1) - first_key"
PACKED_LSE = "lse + head.to(tl.int64) * all_queries + first_row + queries"
TABLE = "block_table + sequence.to(tl.int64) * stride_table"
SLOTS = "slots = start - start // PAGE_SIZE * PAGE_SIZE + key_offsets"
NEXT_PAGE = "tl.minimum(start + BLOCK_N, seqlen_kv - 1)"
NEXT_PAGES = "tl.maximum(tl.minimum(keys + BLOCK_N, seqlen_kv - 1), 0)"
OPEN = Part("for start in tl.range(0, n_full_max", "page = next_page")


def places(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (
        *packed(size),
        *lengths(size),
        *rows(size),
        *paged(size),
        *head_factors(size.masked(**HEAD_SCALED)),
        *page_factors(size),
    )


def packed(size: Size) -> tuple[Mutant, ...]:
    """Sequences one behind the other."""
    subject = size.masked(packed=3 * size.seqlen // 2)
    room = f"(seqlen_q // {size.block_m} + sequences) * heads"
    changes = (
        change("queries begin one row late", "Queries are those of the row behind.",
               "q + first_row.to", "q + (first_row + 1).to"),
        change("outputs begin one row late", "Outputs go to the row behind.",
               "out + first_row.to", "out + (first_row + 1).to"),
        change("values begin one row late", "Weights meet the values behind their own.",
               "v + first_key.to", "v + (first_key + 1).to"),
        change("keys of the first sequence", "All sequences meet the keys of one.",
               "k + first_key.to(tl.int64)", "k + 0"),
        change("first key of the next sequence seen", "A sequence has a key more than it has.",
               KEYS_END, f"{KEYS_END} + 1"),
        change("last key of a sequence forgotten", "A sequence has a key less than it has.",
               KEYS_END, f"tl.maximum({KEYS_END} - 1, 0)"),
        change("queries of the next sequence written", "A sequence has a query more than it has.",
               "query_exists = queries < seqlen_q", "query_exists = queries <= seqlen_q"),
        change("sequence of the tile before", "Sequences that begin by a tile are found a tile late.",
               "(begins <= tile) & (others < sequences)", "(begins < tile) & (others < sequences)"),
        change("tiles of a sequence counted from a row too far",
               "A sequence that begins in a tile begins in the next.",
               "tile -= first_row // BLOCK_M", "tile -= tl.cdiv(first_row, BLOCK_M)"),
        change("no room for the last tiles", "Sequences have no tile for their last, partial rows.",
               room, room.replace("+ sequences", "+ 1")),
        change("last sequence left out", "Its tiles are not looked for.",
               "cu_seqlens_q.shape[0] - 1", "cu_seqlens_q.shape[0] - 2"),
        change("lse at a sequence's rows", "All sequences write their log-sum-exp to the first rows.",
               PACKED_LSE, PACKED_LSE.replace(" + first_row", "")),
        change("lse by a sequence's length", "Heads lie as far apart as a sequence is long.",
               PACKED_LSE, PACKED_LSE.replace("all_queries", "seqlen_q")),
    )  # fmt: skip
    return mutants_of(subject, changes)


def lengths(size: Size) -> tuple[Mutant, ...]:
    """Sequences with as many keys as a tensor says, without a mask."""
    changes = (
        change("tail of K unmasked", "Padding behind the last key takes part in the softmax.",
               SEEN, "visible = (keys >= 0)[None, :]"),
        change("tail one key too long", "The key behind the last takes part in the softmax.",
               SEEN, SEEN.replace("seqlen_kv", "seqlen_kv + 1")),
        change("tail one key too short", "The last key is masked where the last block is not whole.",
               SEEN, SEEN.replace("seqlen_kv", "seqlen_kv - 1")),
        change("length of the next sequence", "A sequence has as many keys as the next.",
               LENGTH, LENGTH.replace("+ sequence", "+ sequence + 1")),
        change("length of the first sequence", "All sequences have as many keys as one.",
               LENGTH, LENGTH.replace(" + sequence", "")),
        change("lengths ignored", "All sequences are as long as the longest.", LENGTH, "pass"),
        change("a last block of a single key skipped", "The last block is left out where it holds one key.",
               "tl.range(n_full_max, n_max,", "tl.range(n_full_max, n_max - 1,"),
        change("first block skipped", "The first block of keys is left out where it is whole.",
               "tl.range(0, n_full_max,", "tl.range(BLOCK_N, n_full_max,"),
    )  # fmt: skip
    return mutants_of(size.masked(kv_lengths=True, causal=Causal.NONE), changes)


def rows(size: Size) -> tuple[Mutant, ...]:
    """Heads and rows of a launch that takes the longest tiles first."""
    exists = "query_exists = queries < seqlen_q"
    subject = size.masked({"lpt": True, "heads_innermost": True}, softcap=True)
    changes = (
        change("KV heads in turn", "Query heads take the KV heads in turn, not in groups.",
               "head // group_size", "head % (heads // group_size)"),
        change("longest tile past the end", "Counting down from the last tile starts one too late.",
               "tile = tiles - 1 - tile", "tile = tiles - tile"),
        change("a tile of two heads", "Tiles of some heads are done twice and some never.",
               "tl.program_id(0) // all_heads", "tl.program_id(0) // (all_heads + 1)"),
        change("heads of the first sequence", "All sequences have the queries of one.",
               "q + sequence * stride_qb", "q"),
        change("values of the first sequence", "All sequences meet the values of one.",
               "v + sequence * stride_vb", "v"),
        change("last rows not written", "The last query is left out.", exists, f"{exists} - 1"),
        change("rows behind the last written", "Rows of the last tile that do not exist are written.",
               exists, "query_exists = queries >= 0"),
        change("lse of another head", "The log-sum-exp is written where the next head's lies.",
               "tl.store(lse + ", "tl.store(lse + seqlen_q + "),
    )  # fmt: skip
    return mutants_of(subject, changes)


def paged(size: Size) -> tuple[Mutant, ...]:
    """Pages that hold several blocks of keys."""
    changes = (
        change("pages of another sequence", "A sequence's keys are those of the one before.",
               TABLE, TABLE.replace("sequence.to(tl.int64)", "tl.maximum(sequence - 1, 0)")),
        change("page of the block before", "Pages are never left.", "page = next_page", "pass", LOOPS),
        Change("page of the block before in open blocks", "Where no mask is needed pages are never left.",
               (Patch("next_page = tl.load(", "next_page = page + 0 * tl.load(", OPEN),)),
        change("page of the block behind", "The page that is loaded ahead is one block further.",
               NEXT_PAGE, NEXT_PAGE.replace("BLOCK_N", "2 * BLOCK_N"), LOOPS),
        change("pages counted by blocks", "Every block of keys is looked for in a page of its own.",
               f"tl.maximum({NEXT_PAGE}, 0) // PAGE_SIZE", f"tl.maximum({NEXT_PAGE}, 0) // BLOCK_N", LOOPS),
        change("every block at its page's start", "Blocks of a page are all the first.",
               SLOTS, "slots = key_offsets", LOOPS),
        change("keys by their place in the sequence", "Rows of a page are counted from the sequence's start.",
               SLOTS, "slots = start + key_offsets", LOOPS),
        change("values in pages of keys", "Pages of V lie as far apart as those of K.",
               "page.to(tl.int64) * stride_vb", "page.to(tl.int64) * stride_kb", LOOPS),
        change("pages of one head", "All query heads meet the keys of one KV head.",
               "k_base = k + kv_head * stride_kh", "k_base = k"),
    )  # fmt: skip
    return mutants_of(size.masked(page_size=size.page), changes)


def page_factors(size: Size) -> tuple[Mutant, ...]:
    """Small pages, with scales of their own."""
    of_k, of_v = (
        f"tl.load({letter}_scale_base + page.to(tl.int64) * stride_{letter}_scale_p)" for letter in "kv"
    )
    k_factor, v_factor = f"k_factor = {of_k}", f"v_factor = {of_v}"
    low = "p_low = (p * v_factor[None, :])"
    changes = (
        change("page scale of keys missing", "Keys count as their 8 bits say.",
               "s *= k_factor[None, :]", "pass", LOOPS),
        change("page scale of keys by place", "Scales are looked for where the first pages' lie.",
               k_factor, k_factor.replace("page.to(tl.int64)", "(keys // PAGE_SIZE)"), LOOPS),
        change("page scale of values by the stride of keys'", "Scales of V lie as far apart as those of K.",
               v_factor, v_factor.replace("stride_v_scale_p", "stride_k_scale_p"), LOOPS),
        change("page scale of values is the keys'", "Values have the scales of their page's keys.",
               v_factor, f"v_factor = {of_k}", LOOPS),
        change("page scale of values missing", "Values count as their 8 bits say.",
               "p * v_factor[None, :]", "p", LOOPS),
        change("page scale of values in the sum", "The sum of weights is scaled as the values are.",
               low, f"running_sum += tl.sum(p * v_factor[None, :] - p, 1)\n{low}", LOOPS),
        change("page behind the last key looked up", "Unused entries of a block table are read.",
               NEXT_PAGES, "(keys + BLOCK_N)", LOOPS),
        change("rows of small pages from the sequence's start",
               "Rows of a page are not counted from its start.",
               "slots = keys % PAGE_SIZE", "slots = keys", LOOPS),
    )  # fmt: skip
    subject = size.masked(
        {"block_n": SMALL_PAGES_BLOCK}, page_size=SMALL_PAGE, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE
    )
    return mutants_of(subject, changes)
