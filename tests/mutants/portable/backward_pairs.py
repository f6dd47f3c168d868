"""Mutants of the split backward family: wrong pairs of a query and a key."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.portable.backward_size import (
    DIAGONAL,
    HIDE,
    KEYS,
    LOOPS,
    LOW_SCORES,
    LOW_WEIGHTS,
    QUERIES,
    ROW_END,
    Size,
)


def masks(size: Size) -> tuple[Mutant, ...]:
    """Which keys a query sees, in either kernel."""
    of_keys_and_queries = [
        row
        for kernel, part in (("keys", KEYS), ("queries", QUERIES))
        for row in (
            (f"{kernel}: diagonal one key too far",
             ROW_END, ROW_END.replace("positions", "positions + 1"), part),
            (f"{kernel}: diagonal one key too short",
             ROW_END, ROW_END.replace("positions", "positions - 1"), part),
            (f"{kernel}: diagonal aligned to the other corner", DIAGONAL, "diagonal = 0", part),
            (f"{kernel}: diagonal off", HIDE, "pass", part),
        )
    ]  # fmt: skip
    return (
        *mutants_of(size.subject(), of_keys_and_queries),
        *mutants_of(size.subject(Causal.NONE), (
            # The weight of padding overflows where scores are far below zero.
            ("tail of keys unmasked", HIDE, "pass", QUERIES),
        )),
    )  # fmt: skip


def blocks(size: Size) -> tuple[Mutant, ...]:
    """Which blocks a program walks."""
    causal, full = size.subject(), size.subject(Causal.NONE)
    return (
        *mutants_of(causal, (
            ("queries of the diagonal's block skipped",
             "m_min // BLOCK_M * BLOCK_M", "tl.cdiv(m_min, BLOCK_M) * BLOCK_M", KEYS),
            ("open blocks of queries one too many",
             "m_full_min = tl.cdiv(m_full_min, BLOCK_M)", "m_full_min = (m_full_min // BLOCK_M)", KEYS),
            ("open blocks of keys one too many",
             "tl.maximum(key_stop(first_position,", "tl.maximum(key_stop(last_position,"),
            ("last block of keys skipped",
             "n_max = key_stop(last_position", "n_max = key_stop(first_position"),
            ("first block of keys skipped",
             "tl.range(0, n_full_max, BLOCK_N)", "tl.range(BLOCK_N, n_full_max, BLOCK_N)", QUERIES),
        )),
        *mutants_of(full, (
            ("tail of queries skipped", "m_max = seqlen_q", "m_max = seqlen_q // BLOCK_M * BLOCK_M", KEYS),
            ("tail of keys skipped", "n_max = seqlen_kv", "n_max = seqlen_kv // BLOCK_N * BLOCK_N", QUERIES),
            ("last open block of a group skipped",
             "tl.range(0, group_size * full_blocks)", "tl.range(0, group_size * full_blocks - 1)", KEYS),
        )),
    )  # fmt: skip


def forgotten(size: Size) -> tuple[Mutant, ...]:
    """Pairs of a query and a key that one gradient misses."""
    causal = size.subject()
    some_rows = "(queries % 8 == 3)[:, None] & (start == BLOCK_N)"
    some_keys = "(keys % 8 == 3)[:, None] & (query_offsets == 5)[None, :]"
    return mutants_of(causal, (
        ("dq: a block of keys forgotten in some rows",
         LOW_SCORES, f"ds = tl.where({some_rows}, 0.0, ds)\n{LOW_SCORES}", QUERIES, LOOPS),
        ("dk: one query at some keys forgotten",
         LOW_SCORES, f"ds = tl.where({some_keys}, 0.0, ds)\n{LOW_SCORES}", KEYS, LOOPS),
        ("dv: one query at some keys forgotten",
         LOW_WEIGHTS, f"p_low = tl.where({some_keys}, 0.0, p).to(q.dtype.element_ty)", KEYS, LOOPS),
    ))  # fmt: skip
