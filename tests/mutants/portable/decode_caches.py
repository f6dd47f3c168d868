"""Mutants of the decoding family: packed tokens, pages, latent keys and caches of 8 bits."""

from flashtune.core.problem import Dtype, KvDtype, KvScale
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.portable.head_factors import HEAD_SCALED, head_factors
from tests.mutants.serving_size import SMALL_PAGE, SMALL_PAGES_BLOCK, Size

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
    return mutants_of(size.decoding(packed=6), (
        ("tokens one row late", "tokens = first_row + queries", "tokens = first_row + queries + 1"),
        ("parts at a sequence's tokens",
         "split * all_rows + tokens * heads", "split * all_rows + queries * heads"),
        ("first key of the next sequence seen", KEYS_END, f"{KEYS_END} + 1"),
        ("keys of the first sequence", "k + first_key.to(tl.int64)", "k + 0"),
        ("values begin one row late", "v + first_key.to", "v + (first_key + 1).to"),
        ("sequence of the tile before",
         "(begins <= tile) & (others < sequences)", "(begins < tile) & (others < sequences)"),
        ("tiles of tokens, not of rows", begins, begins.replace(" * group_size", "")),
        ("tiles of a sequence counted from a row too far",
         "tile -= first_row * group_size // BLOCK_M", "tile -= tl.cdiv(first_row * group_size, BLOCK_M)"),
        ("tokens one too few", count, f"{count} - 1"),
        ("tokens one too many", count, f"{count} + 1"),
        ("tokens counted as rows", "row >= token_count * heads", "row >= token_count"),
        ("no room for the last tiles", "group_size // 16 + sequences", "group_size // 16 + 1"),
    ))  # fmt: skip


def paged(size: Size) -> tuple[Mutant, ...]:
    """Pages that hold several blocks of keys, in several parts."""
    return mutants_of(size.decoding(page_size=size.page), (
        ("pages of another sequence",
         TABLE, TABLE.replace("sequence.to(tl.int64)", "tl.maximum(sequence - 1, 0)")),
        ("page of the block before", "page = next_page", "pass"),
        ("page of the block behind", NEXT_PAGE, NEXT_PAGE.replace("BLOCK_N", "2 * BLOCK_N")),
        ("parts begin in the first page", FIRST_PAGE, FIRST_PAGE.replace("first", "0")),
        ("parts begin in the page of the next", FIRST_PAGE, FIRST_PAGE.replace("first", "last")),
        ("pages counted by blocks",
         f"tl.maximum({NEXT_PAGE}, 0) // PAGE_SIZE", f"tl.maximum({NEXT_PAGE}, 0) // BLOCK_N"),
        ("tail of the last page read", SLOTS, "slots = keys % PAGE_SIZE"),
        ("every block at its page's start",
         SLOTS, "slots = tl.minimum(key_offsets, seqlen_kv - 1) % PAGE_SIZE"),
        ("rows of a page one late",
         SLOTS, SLOTS.replace("tl.minimum(keys, seqlen_kv - 1)", "(tl.minimum(keys, seqlen_kv - 1) + 1)")),
        ("values in pages of keys", "page.to(tl.int64) * stride_vb", "page.to(tl.int64) * stride_kb"),
        ("length of the next sequence",
         "tl.load(seqlens_kv + sequence)", "tl.load(seqlens_kv + sequence + 1)"),
        ("length of the first sequence", "tl.load(seqlens_kv + sequence)", "tl.load(seqlens_kv)"),
    ))  # fmt: skip


def latent(size: Size) -> tuple[Mutant, ...]:
    """Values that are the first columns of keys, in small pages."""
    values = size.block_n if size.dtype is Dtype.FP32 else 64
    behind = f"(columns_{values} + {values})[None, :]"
    rope = "tl.dot(q_tile_1, k_tile_1.T, s"
    subject = size.decoding(
        {"block_n": SMALL_PAGES_BLOCK, "num_splits": 2},
        mla=True, page_size=SMALL_PAGE, heads=8, kv_heads=1, head_dim=2 * values, value_head_dim=values,
    )  # fmt: skip
    return mutants_of(subject, (
        ("rope part left out", rope, "s + 0.0 * tl.dot(q_tile_1, k_tile_1.T"),
        ("rope part alone", rope, rope.removesuffix(", s")),
        ("queries' first columns twice", rope, rope.replace("q_tile_1", "q_tile_0")),
        ("keys' first columns twice", rope, rope.replace("k_tile_1", "v_tile")),
        ("rope part by the queries' columns",
         f"q_rows[:, None] + {behind}", f"q_rows[:, None] + columns_{values}[None, :]"),
        ("values are the rope part", "tl.dot(p_low, v_tile,", "tl.dot(p_low, k_tile_1,"),
        ("pages looked up by the block", NEXT_PAGES, NEXT_PAGES.replace("key_offsets", "key_offsets * 0")),
        ("page behind the last key looked up", NEXT_PAGES, "(key_offsets + (start + BLOCK_N))"),
    ))  # fmt: skip


def page_factors(size: Size) -> tuple[Mutant, ...]:
    """Scales of pages: of those that hold a part of a block, and of those that hold several."""
    of_k, of_v = (
        f"tl.load({letter}_scale_base + page.to(tl.int64) * stride_{letter}_scale_p)" for letter in "kv"
    )
    k_factor, v_factor = f"k_factor = {of_k}", f"v_factor = {of_v}"
    fields = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}
    pages = size.decoding({"block_n": SMALL_PAGES_BLOCK, "num_splits": 2}, page_size=SMALL_PAGE, **fields)
    return (
        *mutants_of(pages, (
            ("page scale of keys missing", "s *= k_factor[None, :]", "pass"),
            ("page scale of keys by place",
             k_factor, k_factor.replace("page.to(tl.int64)", "(slots // PAGE_SIZE)")),
            ("page scale of values by the stride of keys'",
             v_factor, v_factor.replace("stride_v_scale_p", "stride_k_scale_p")),
            ("page scale of values is the keys'", v_factor, f"v_factor = {of_k}"),
            ("page scale of values missing", "p *= v_factor[None, :]", "pass"),
            ("page scale of values in the sum",
             "p *= v_factor[None, :]",
             "running_sum += tl.sum(p * v_factor[None, :] - p, 1)\np *= v_factor[None, :]"),
        )),
        *mutants_of(size.decoding({"num_splits": 1}, page_size=size.page, **fields), (
            ("page scale of the block behind",
             "product * v_factor",
             "product * tl.load(v_scale_base + next_page.to(tl.int64) * stride_v_scale_p)"),
            ("page scale on all values so far",
             "accumulator * rescale[:, None] + product * v_factor",
             "(accumulator * rescale[:, None] + product) * v_factor"),
        )),
    )  # fmt: skip
