"""Mutants of lists of a block mask, in the masked and the split backward family."""

import msgspec

from flashtune.core.problem import BlockLists, Causal
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.portable import backward_size as backward
from tests.mutants.serving_size import FIRST_TOKENS, Size

QUERY_BLOCK = "query_block = first_query // MASK_BLOCK"
COUNT = "tl.load(block_counts + sequence * stride_counts_b + list_head * stride_counts_h + query_block)"
PLACE = "block_indices + sequence * stride_indices_b + list_head * stride_indices_h"
DELTA = Part("def delta(", "def backward_split(")
IN_BLOCK = " + start - start // MASK_BLOCK * MASK_BLOCK"
LAST = "listed_keys(tl.cdiv(n_max, MASK_BLOCK)"
FULL = "listed_keys(n_full_max // MASK_BLOCK"
FIRST = "listed_keys(n_min // MASK_BLOCK"
FULL_FIRST = "listed_keys(tl.cdiv(n_full_min, MASK_BLOCK)"
LIFTED = "listed_keys(tl.cdiv(n_lifted, MASK_BLOCK)"


def lists(size: Size) -> tuple[Mutant, ...]:
    """Returns causal mutants with lists of each head: lists of a tile, and the blocks in them."""
    subject = size.masked(block_mask=_mask_block(size))
    return (
        *mutants_of(subject, (
            ("list of the query block before",
             QUERY_BLOCK, "query_block = tl.maximum(first_query // MASK_BLOCK - 1, 0)"),
            ("list of a tile's number",
             QUERY_BLOCK, "query_block = tl.minimum(first_query // BLOCK_M, (seqlen_q - 1) // MASK_BLOCK)"),
            ("lists of the next head", "list_head = head", "list_head = (head + 1) % heads"),
            ("lists of the first sequence", PLACE, PLACE.replace("sequence *", "0 *")),
            ("counts of the first sequence", COUNT, COUNT.replace("sequence *", "0 *")),
            ("count ignored", COUNT, "tl.cdiv(seqlen_kv, MASK_BLOCK)"),
            ("last block of a list skipped", COUNT, f"tl.maximum({COUNT} - 1, 0)"),
            ("first block of a list skipped", PLACE, f"{PLACE} + 1"),
            ("no mask on the diagonal block",
             FULL, FULL.replace("n_full_max // MASK_BLOCK", "tl.cdiv(n_full_max, MASK_BLOCK)")),
            ("diagonal block left out",
             LAST, LAST.replace("tl.cdiv(n_max, MASK_BLOCK)", "n_max // MASK_BLOCK")),
            ("block stays", "block = next_block", "pass", None, 2),
            ("block one step late",
             "tl.minimum(start + BLOCK_N, n_max - 1)", "tl.minimum(start, n_max - 1)", None, 2),
            ("first keys of a block", IN_BLOCK, "", None, 2),
            ("search counts the block itself", "(blocks < block)", "(blocks <= block)"),
        )),
        *_others(size),
    )  # fmt: skip


def _others(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of lists of groups without a causal mask, and of windows."""
    near = 3 * size.block_n + 4
    groups = size.masked(block_mask=_mask_block(size), block_lists=BlockLists.GROUP, causal=Causal.NONE)
    window = size.masked(block_mask=_mask_block(size), window_left=near)
    first = size.masked(
        block_mask=_mask_block(size), window_left=3 * size.block_n + 4, sink_tokens=FIRST_TOKENS
    )
    return (
        *mutants_of(groups, (
            ("lists of the first group", "list_head = kv_head", "list_head = kv_head * 0"),
            ("last keys without a bound",
             FULL, FULL.replace("n_full_max // MASK_BLOCK", "tl.cdiv(n_full_max, MASK_BLOCK)")),
        )),
        *mutants_of(window, (
            ("first block of a window's list skipped",
             FIRST, FIRST.replace("n_min // MASK_BLOCK", "tl.cdiv(n_min, MASK_BLOCK)")),
            ("no mask on the first block of a window", FULL_FIRST, "listed_keys(n_full_min // MASK_BLOCK"),
        )),
        *mutants_of(first, (
            ("listed first tokens skipped",
             LIFTED, LIFTED.replace("tl.cdiv(n_lifted, MASK_BLOCK)", "n_lifted // MASK_BLOCK")),
            ("listed first tokens twice",
             f"tl.minimum({LIFTED}, block_list, block_count), n_min)", f"{LIFTED}, block_list, block_count)"),
        )),
    )  # fmt: skip


def _mask_block(size: Size) -> int:
    """Returns the queries and keys of a block of the mask, more than those of a tile."""
    return 64 if size.block_m < 64 else 128


def long_lists(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of lists longer than a step of the search. The interpreter takes too long for them."""
    return mutants_of(size.masked(block_mask=_mask_block(size)), (
        ("search ends after one step",
         "tl.range(0, block_count, LISTED)", "tl.range(0, tl.minimum(block_count, LISTED), LISTED)"),
    ))  # fmt: skip


def gradient_lists(size: backward.Size) -> tuple[Mutant, ...]:
    """Returns mutants of gradients, causal, with lists of each head."""
    plain = size.subject()
    subject = plain._replace(problem=msgspec.structs.replace(plain.problem, block_mask=128))
    return mutants_of(subject, (
        ("keys: block of the tile's number",
         "key_begin // MASK_BLOCK", "tl.minimum(tile, key_blocks - 1)", backward.KEYS),
        ("keys: last listed block skipped",
         "listed_tiles = listed", "listed_tiles = tl.maximum(listed - 1, 0)", backward.KEYS),
        ("keys: lists of the group's first head",
         "(first_list + member * key_blocks)", "first_list", backward.KEYS, backward.LOOPS + 1),
        ("keys: lists of the first sequence",
         "first_list = (sequence *", "first_list = (0 *", backward.KEYS),
        ("keys: count among the entries",
         "queries_list + 1 + place", "queries_list + place", backward.KEYS, backward.LOOPS),
        ("lists of queries: count ignored", "mask=place < lengths", "mask=place < key_blocks", DELTA),
        ("lists of queries: last block of a list skipped",
         "tl.range(0, tl.max(lengths, 0))", "tl.range(0, tl.max(lengths, 0) - 1)", DELTA),
        ("lists of queries: counts of the first sequence",
         "block_counts + sequence *", "block_counts + 0 *", DELTA),
        ("lists of queries: those of the first sequence", PLACE, PLACE.replace("sequence *", "0 *"), DELTA),
        ("lists of queries: those of the next head",
         "item // key_blocks % list_heads", "(item // key_blocks + 1) % list_heads", DELTA),
        ("queries: count ignored", COUNT, "tl.cdiv(seqlen_kv, MASK_BLOCK)", backward.QUERIES),
        ("queries: lists of the next head",
         "list_head = head", "list_head = (head + 1) % heads", backward.QUERIES),
        ("queries: first keys of a block",
         " + start - start // MASK_BLOCK * MASK_BLOCK", "", backward.QUERIES, backward.LOOPS),
        ("queries: no mask on the diagonal block",
         "listed_keys(n_full_max // MASK_BLOCK", "listed_keys(tl.cdiv(n_full_max, MASK_BLOCK)",
         backward.QUERIES),
    ))  # fmt: skip
