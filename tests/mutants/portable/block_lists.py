"""Mutants of lists of a block mask, in the masked and the split backward family."""

from __future__ import annotations

import msgspec

from flashtune.core.problem import BlockLists, Causal
from tests.mutants.core import Mutant, Patch, Subject
from tests.mutants.portable import backward_size as backward
from tests.mutants.serving_size import FIRST_TOKENS, Size, change, mutants_of

QUERY_BLOCK = "query_block = first_query // MASK_BLOCK"
COUNT = "tl.load(block_counts + sequence * stride_counts_b + list_head * stride_counts_h + query_block)"
PLACE = "block_indices + sequence * stride_indices_b + list_head * stride_indices_h"
TEST = "is_listed(key_begin // MASK_BLOCK, block_list, block_count)"
LIST_OF_QUERIES = "query_block = start // MASK_BLOCK"
IN_BLOCK = " + start - start // MASK_BLOCK * MASK_BLOCK"
LAST = "listed_keys(tl.cdiv(n_max, MASK_BLOCK)"
FULL = "listed_keys(n_full_max // MASK_BLOCK"
FIRST = "listed_keys(n_min // MASK_BLOCK"
FULL_FIRST = "listed_keys(tl.cdiv(n_full_min, MASK_BLOCK)"
LIFTED = "listed_keys(tl.cdiv(n_lifted, MASK_BLOCK)"


def lists(size: Size) -> tuple[Mutant, ...]:
    """Causal, with lists of each head: those of a tile, and the blocks in them."""
    subject = size.masked(block_mask=_mask_block(size))
    changes = (
        change("list of the query block before", "Queries see the blocks of the block before theirs.",
               QUERY_BLOCK, "query_block = tl.maximum(first_query // MASK_BLOCK - 1, 0)"),
        change("list of a tile's number", "Tiles count as blocks of queries.",
               QUERY_BLOCK, "query_block = tl.minimum(first_query // BLOCK_M, (seqlen_q - 1) // MASK_BLOCK)"),
        change("lists of the next head", "Every head sees the blocks of another head.",
               "list_head = head", "list_head = (head + 1) % heads"),
        change("lists of the first sequence", "All sequences see the blocks of the first.",
               PLACE, PLACE.replace("sequence *", "0 *")),
        change("counts of the first sequence", "Lists end where those of the first sequence end.",
               COUNT, COUNT.replace("sequence *", "0 *")),
        change("count ignored", "Elements after the end of a list are blocks too.",
               COUNT, "tl.cdiv(seqlen_kv, MASK_BLOCK)"),
        change("last block of a list skipped", "The last element of a list is left out.",
               COUNT, f"tl.maximum({COUNT} - 1, 0)"),
        change("first block of a list skipped", "Lists begin at their second element.",
               PLACE, f"{PLACE} + 1"),
        change("no mask on the diagonal block", "Blocks that the diagonal cuts are taken without a mask.",
               FULL, FULL.replace("n_full_max // MASK_BLOCK", "tl.cdiv(n_full_max, MASK_BLOCK)")),
        change("diagonal block left out", "Blocks that the diagonal or the last key cuts are left out.",
               LAST, LAST.replace("tl.cdiv(n_max, MASK_BLOCK)", "n_max // MASK_BLOCK")),
        change("block stays", "All blocks of a list are its first one.",
               "block = next_block", "pass", times=2),
        change("block one step late", "The first part of a block is that of the block before.",
               "tl.minimum(start + BLOCK_N, n_max - 1)", "tl.minimum(start, n_max - 1)", times=2),
        change("first keys of a block", "All parts of a block are its first part.", IN_BLOCK, "", times=2),
        change("search counts the block itself", "Blocks at the diagonal count as before it.",
               "(blocks < block)", "(blocks <= block)"),
    )  # fmt: skip
    return (*mutants_of(subject, changes), *_others(size))


def _others(size: Size) -> tuple[Mutant, ...]:
    """Lists of groups without a causal mask, and windows."""
    near = 3 * size.block_n + 4
    groups = size.masked(block_mask=_mask_block(size), block_lists=BlockLists.GROUP, causal=Causal.NONE)
    window = size.masked(block_mask=_mask_block(size), window_left=near)
    first = size.masked(
        block_mask=_mask_block(size), window_left=3 * size.block_n + 4, sink_tokens=FIRST_TOKENS
    )
    return (
        *mutants_of(groups, (
            change("lists of the first group", "All groups see the blocks of the first.",
                   "list_head = kv_head", "list_head = kv_head * 0"),
            change("last keys without a bound", "A last block that is not whole is taken without a mask.",
                   FULL, FULL.replace("n_full_max // MASK_BLOCK", "tl.cdiv(n_full_max, MASK_BLOCK)")),
        )),
        *mutants_of(window, (
            change("first block of a window's list skipped",
                   "Blocks that a window's start cuts are left out.",
                   FIRST, FIRST.replace("n_min // MASK_BLOCK", "tl.cdiv(n_min, MASK_BLOCK)")),
            change("no mask on the first block of a window",
                   "Blocks that a window's start cuts have no mask.",
                   FULL_FIRST, "listed_keys(n_full_min // MASK_BLOCK"),
        )),
        *mutants_of(first, (
            change("listed first tokens skipped", "First tokens that fill no block of the mask are left out.",
                   LIFTED, LIFTED.replace("tl.cdiv(n_lifted, MASK_BLOCK)", "n_lifted // MASK_BLOCK")),
            change("listed first tokens twice", "A block of first tokens that is in the window counts twice.",
                   f"tl.minimum({LIFTED}, block_list, block_count), n_min)",
                   f"{LIFTED}, block_list, block_count)"),
        )),
    )  # fmt: skip


def _mask_block(size: Size) -> int:
    """Queries and keys of a block of the mask, more than those of a tile."""
    return 64 if size.block_m < 64 else 128


def long_lists(size: Size) -> tuple[Mutant, ...]:
    """Lists that are longer than a step of the search, which take too long under the interpreter."""
    changes = (
        change("search ends after one step", "Blocks after the first 128 of a list count as hidden.",
               "tl.range(0, block_count, LISTED)", "tl.range(0, tl.minimum(block_count, LISTED), LISTED)"),
    )  # fmt: skip
    return mutants_of(size.masked(block_mask=_mask_block(size)), changes)


def gradient_lists(size: backward.Size) -> tuple[Mutant, ...]:
    """In gradients: causal, with lists of each head."""
    plain = size.subject()
    subject = plain._replace(problem=msgspec.structs.replace(plain.problem, block_mask=128))
    return (
        _mutant(subject, "keys: lists unread", "Gradients dk and dv are those without a block mask.",
                Patch(TEST, "block_count >= 0", backward.KEYS, backward.LOOPS)),
        _mutant(subject, "keys: block of the tile's number", "Tiles of keys count as blocks.",
                Patch(TEST, TEST.replace("key_begin // MASK_BLOCK", "tile"), backward.KEYS, backward.LOOPS)),
        _mutant(subject, "keys: list of the first queries", "All queries see the blocks of the first.",
                Patch(LIST_OF_QUERIES, "query_block = start * 0", backward.KEYS, backward.LOOPS)),
        _mutant(subject, "keys: count ignored", "Elements after the end of a list are blocks too.",
                Patch(COUNT, "tl.cdiv(seqlen_kv, MASK_BLOCK)", backward.KEYS, backward.LOOPS)),
        _mutant(subject, "keys: lists of the group's first head", "Heads of a group share lists.",
                Patch("list_head = head", "list_head = kv_head * group_size", backward.KEYS, backward.LOOPS)),
        _mutant(subject, "keys: lists of the first sequence", "All sequences see the blocks of the first.",
                Patch(PLACE, PLACE.replace("sequence *", "0 *"), backward.KEYS, backward.LOOPS)),
        _mutant(subject, "queries: count ignored", "Elements after the end of a list are blocks too.",
                Patch(COUNT, "tl.cdiv(seqlen_kv, MASK_BLOCK)", backward.QUERIES)),
        _mutant(subject, "queries: lists of the next head", "Every head sees the blocks of another head.",
                Patch("list_head = head", "list_head = (head + 1) % heads", backward.QUERIES)),
        _mutant(subject, "queries: first keys of a block", "All parts of a block are its first part.",
                Patch(" + start - start // MASK_BLOCK * MASK_BLOCK", "", backward.QUERIES, backward.LOOPS)),
        _mutant(subject, "queries: no mask on the diagonal block", "The diagonal's blocks have no mask.",
                Patch("listed_keys(n_full_max // MASK_BLOCK", "listed_keys(tl.cdiv(n_full_max, MASK_BLOCK)",
                      backward.QUERIES)),
    )  # fmt: skip


def _mutant(subject: Subject, name: str, breaks: str, patch: Patch) -> Mutant:
    return Mutant(name, breaks, subject, (patch,))
