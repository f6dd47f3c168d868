"""Mutants of the masked family: packed sequences, lengths, pages, scales of caches, heads and rows."""

from flashtune.core.problem import Causal, KvDtype, KvScale
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.portable.head_factors import HEAD_SCALED, head_factors
from tests.mutants.serving_size import SMALL_PAGE, SMALL_PAGES_BLOCK, Size

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
    return mutants_of(subject, (
        ("queries begin one row late", "q + first_row.to", "q + (first_row + 1).to"),
        ("outputs begin one row late", "out + first_row.to", "out + (first_row + 1).to"),
        ("values begin one row late", "v + first_key.to", "v + (first_key + 1).to"),
        ("keys of the first sequence", "k + first_key.to(tl.int64)", "k + 0"),
        ("first key of the next sequence seen", KEYS_END, f"{KEYS_END} + 1"),
        ("last key of a sequence forgotten", KEYS_END, f"tl.maximum({KEYS_END} - 1, 0)"),
        ("queries of the next sequence written",
         "query_exists = queries < seqlen_q", "query_exists = queries <= seqlen_q"),
        ("sequence of the tile before",
         "(begins <= tile) & (others < sequences)", "(begins < tile) & (others < sequences)"),
        ("tiles of a sequence counted from a row too far",
         "tile -= first_row // BLOCK_M", "tile -= tl.cdiv(first_row, BLOCK_M)"),
        ("no room for the last tiles", room, room.replace("+ sequences", "+ 1")),
        ("last sequence left out", "cu_seqlens_q.shape[0] - 1", "cu_seqlens_q.shape[0] - 2"),
        ("lse at a sequence's rows", PACKED_LSE, PACKED_LSE.replace(" + first_row", "")),
        ("lse by a sequence's length", PACKED_LSE, PACKED_LSE.replace("all_queries", "seqlen_q")),
    ))  # fmt: skip


def lengths(size: Size) -> tuple[Mutant, ...]:
    """Sequences with as many keys as a tensor says, without a mask."""
    return mutants_of(size.masked(kv_lengths=True, causal=Causal.NONE), (
        ("tail of K unmasked", SEEN, "visible = (keys >= 0)[None, :]"),
        ("tail one key too long", SEEN, SEEN.replace("seqlen_kv", "seqlen_kv + 1")),
        ("tail one key too short", SEEN, SEEN.replace("seqlen_kv", "seqlen_kv - 1")),
        ("length of the next sequence", LENGTH, LENGTH.replace("+ sequence", "+ sequence + 1")),
        ("length of the first sequence", LENGTH, LENGTH.replace(" + sequence", "")),
        ("lengths ignored", LENGTH, "pass"),
        ("a last block of a single key skipped",
         "tl.range(n_full_max, n_max,", "tl.range(n_full_max, n_max - 1,"),
        ("first block skipped", "tl.range(0, n_full_max,", "tl.range(BLOCK_N, n_full_max,"),
    ))  # fmt: skip


def rows(size: Size) -> tuple[Mutant, ...]:
    """Heads and rows of a launch that takes the longest tiles first."""
    exists = "query_exists = queries < seqlen_q"
    subject = size.masked({"lpt": True, "heads_innermost": True}, softcap=True)
    return mutants_of(subject, (
        ("KV heads in turn", "head // group_size", "head % (heads // group_size)"),
        ("longest tile past the end", "tile = tiles - 1 - tile", "tile = tiles - tile"),
        ("a tile of two heads", "tl.program_id(0) // all_heads", "tl.program_id(0) // (all_heads + 1)"),
        ("heads of the first sequence", "q + sequence * stride_qb", "q"),
        ("values of the first sequence", "v + sequence * stride_vb", "v"),
        ("last rows not written", exists, f"{exists} - 1"),
        ("rows behind the last written", exists, "query_exists = queries >= 0"),
        ("lse of another head", "tl.store(lse + ", "tl.store(lse + seqlen_q + "),
    ))  # fmt: skip


def paged(size: Size) -> tuple[Mutant, ...]:
    """Pages that hold several blocks of keys."""
    return mutants_of(size.masked(page_size=size.page), (
        ("pages of another sequence",
         TABLE, TABLE.replace("sequence.to(tl.int64)", "tl.maximum(sequence - 1, 0)")),
        ("page of the block before", "page = next_page", "pass", None, LOOPS),
        ("page of the block before in open blocks",
         "next_page = tl.load(", "next_page = page + 0 * tl.load(", OPEN),
        ("page of the block behind", NEXT_PAGE, NEXT_PAGE.replace("BLOCK_N", "2 * BLOCK_N"), None, LOOPS),
        ("pages counted by blocks",
         f"tl.maximum({NEXT_PAGE}, 0) // PAGE_SIZE", f"tl.maximum({NEXT_PAGE}, 0) // BLOCK_N", None, LOOPS),
        ("every block at its page's start", SLOTS, "slots = key_offsets", None, LOOPS),
        ("keys by their place in the sequence", SLOTS, "slots = start + key_offsets", None, LOOPS),
        ("values in pages of keys",
         "page.to(tl.int64) * stride_vb", "page.to(tl.int64) * stride_kb", None, LOOPS),
        ("pages of one head", "k_base = k + kv_head * stride_kh", "k_base = k"),
    ))  # fmt: skip


def page_factors(size: Size) -> tuple[Mutant, ...]:
    """Small pages, with scales of their own."""
    of_k, of_v = (
        f"tl.load({letter}_scale_base + page.to(tl.int64) * stride_{letter}_scale_p)" for letter in "kv"
    )
    k_factor, v_factor = f"k_factor = {of_k}", f"v_factor = {of_v}"
    low = "p_low = (p * v_factor[None, :])"
    subject = size.masked(
        {"block_n": SMALL_PAGES_BLOCK}, page_size=SMALL_PAGE, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE
    )
    return mutants_of(subject, (
        ("page scale of keys missing", "s *= k_factor[None, :]", "pass", None, LOOPS),
        ("page scale of keys by place",
         k_factor, k_factor.replace("page.to(tl.int64)", "(keys // PAGE_SIZE)"), None, LOOPS),
        ("page scale of values by the stride of keys'",
         v_factor, v_factor.replace("stride_v_scale_p", "stride_k_scale_p"), None, LOOPS),
        ("page scale of values is the keys'", v_factor, f"v_factor = {of_k}", None, LOOPS),
        ("page scale of values missing", "p * v_factor[None, :]", "p", None, LOOPS),
        ("page scale of values in the sum",
         low, f"running_sum += tl.sum(p * v_factor[None, :] - p, 1)\n{low}", None, LOOPS),
        ("page behind the last key looked up", NEXT_PAGES, "(keys + BLOCK_N)", None, LOOPS),
        ("rows of small pages from the sequence's start",
         "slots = keys % PAGE_SIZE", "slots = keys", None, LOOPS),
    ))  # fmt: skip
