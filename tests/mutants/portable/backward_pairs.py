"""Mutants of the split backward family: wrong pairs of a query and a key."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Patch
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
    causal, full = size.subject(), size.subject(Causal.NONE)
    both = (("keys", KEYS), ("queries", QUERIES))
    of_either = (
        ("diagonal one key too far", "Every query sees the key after its last one", ROW_END, "positions + 1"),
        ("diagonal one key too short", "No query sees its last key", ROW_END, "positions - 1"),
    )
    return (
        *(
            Mutant(
                f"{kernel}: {name}",
                f"{breaks}, in the kernel of {kernel}.",
                causal,
                (Patch(old, old.replace("positions", new), part),),
            )
            for name, breaks, old, new in of_either
            for kernel, part in both
        ),
        *(
            Mutant(
                f"{kernel}: diagonal aligned to the other corner",
                f"The mask starts at the first key where it should end at the last, for {kernel}.",
                causal,
                (Patch(DIAGONAL, "diagonal = 0", part),),
            )
            for kernel, part in both
        ),
        *(
            Mutant(
                f"{kernel}: diagonal off",
                f"No block is masked in the kernel of {kernel}.",
                causal,
                (Patch(HIDE, "pass", part),),
            )
            for kernel, part in both
        ),
        Mutant(
            "tail of keys unmasked",
            "Padding behind the last key has a weight, which overflows where scores are far below zero.",
            full,
            (Patch(HIDE, "pass", QUERIES),),
        ),
    )


def blocks(size: Size) -> tuple[Mutant, ...]:
    """Which blocks a program walks."""
    causal, full = size.subject(), size.subject(Causal.NONE)
    return (
        Mutant(
            "queries of the diagonal's block skipped",
            "Keys do not meet the block of queries in which they are seen first.",
            causal,
            (Patch("m_min // BLOCK_M * BLOCK_M", "tl.cdiv(m_min, BLOCK_M) * BLOCK_M", KEYS),),
        ),
        Mutant(
            "open blocks of queries one too many",
            "A block of queries of which some see no more than a part is taken without a mask.",
            causal,
            (
                Patch(
                    "m_full_min = tl.cdiv(m_full_min, BLOCK_M)", "m_full_min = (m_full_min // BLOCK_M)", KEYS
                ),
            ),
        ),
        Mutant(
            "open blocks of keys one too many",
            "A block of keys that only some rows see whole is taken without a mask.",
            causal,
            (Patch("tl.maximum(key_stop(first_position,", "tl.maximum(key_stop(last_position,"),),
        ),
        Mutant(
            "last block of keys skipped",
            "A tile of queries meets no more keys than its first query sees.",
            causal,
            (Patch("n_max = key_stop(last_position", "n_max = key_stop(first_position"),),
        ),
        Mutant(
            "tail of queries skipped",
            "Keys do not meet the last block of queries where it is not whole.",
            full,
            (Patch("m_max = seqlen_q", "m_max = seqlen_q // BLOCK_M * BLOCK_M", KEYS),),
        ),
        Mutant(
            "tail of keys skipped",
            "Queries do not meet the last block of keys where it is not whole.",
            full,
            (Patch("n_max = seqlen_kv", "n_max = seqlen_kv // BLOCK_N * BLOCK_N", QUERIES),),
        ),
        Mutant(
            "first block of keys skipped",
            "Queries do not meet the first block of keys where they see it whole.",
            causal,
            (Patch("tl.range(0, n_full_max, BLOCK_N)", "tl.range(BLOCK_N, n_full_max, BLOCK_N)", QUERIES),),
        ),
        Mutant(
            "last open block of a group skipped",
            "The last head of a group misses one of the blocks that no mask touches.",
            full,
            (
                Patch(
                    "tl.range(0, group_size * full_blocks)", "tl.range(0, group_size * full_blocks - 1)", KEYS
                ),
            ),
        ),
    )


def forgotten(size: Size) -> tuple[Mutant, ...]:
    """Pairs of a query and a key that one gradient misses."""
    causal = size.subject()
    some_rows = "(queries % 8 == 3)[:, None] & (start == BLOCK_N)"
    some_keys = "(keys % 8 == 3)[:, None] & (query_offsets == 5)[None, :]"
    return (
        Mutant(
            "dq: a block of keys forgotten in some rows",
            "One row of eight misses the second block of keys.",
            causal,
            (
                Patch(
                    LOW_SCORES,
                    f"ds = tl.where({some_rows}, 0.0, ds)\n{LOW_SCORES}",
                    QUERIES,
                    LOOPS,
                ),
            ),
        ),
        Mutant(
            "dk: one query at some keys forgotten",
            "One key of eight misses the sixth query of each block.",
            causal,
            (Patch(LOW_SCORES, f"ds = tl.where({some_keys}, 0.0, ds)\n{LOW_SCORES}", KEYS, LOOPS),),
        ),
        Mutant(
            "dv: one query at some keys forgotten",
            "One key of eight misses the sixth query of each block.",
            causal,
            (
                Patch(
                    LOW_WEIGHTS,
                    f"p_low = tl.where({some_keys}, 0.0, p).to(q.dtype.element_ty)",
                    KEYS,
                    LOOPS,
                ),
            ),
        ),
    )
