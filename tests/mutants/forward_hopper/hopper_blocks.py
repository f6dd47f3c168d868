"""Mutants of Hopper kernels with a block mask, and of the prologue that lists its blocks."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import PRODUCER, a_small_problem, only, subject

ONE_LIST = subject(a_small_problem(64, batch=2, block_mask=128), lse=True, block_n=64)
CAUSAL = subject(
    a_small_problem(64, Causal.BOTTOM_RIGHT, batch=2, block_mask=128, window_left=100), lse=True, block_n=64
)
GROUP_LISTS = subject(
    a_small_problem(64, batch=2, block_mask=64),
    lse=True,
    num_consumer_groups=2,
    num_stages=2,
    dynamic_schedule=False,
)
RECEIVE = Part("def receive_tile(", "return index, queue.release(state)")


def blocks() -> tuple[Mutant, ...]:
    """Those of the kernel itself."""
    return mutants_of(
        (
            (
                "blocks: a tile is passed over",
                "A tile is not computed.",
                ONE_LIST,
                only(
                    "num_programs + read_ticket(ticket)", "num_programs + 1 + read_ticket(ticket)", PRODUCER
                ),
            ),
            (
                "blocks: lists of head 0",
                "One block mask for all heads.",
                ONE_LIST,
                only("head = gl.minimum(", "head = 0 * gl.minimum("),
            ),
            (
                "blocks: lists of batch 0",
                "One block mask for all batches.",
                ONE_LIST,
                only("batch = gl.minimum(tile", "batch = 0 * gl.minimum(tile"),
            ),
        )
    ) + mutants_of(
        (
            (
                "blocks: index never released",
                "The producer waits.",
                ONE_LIST,
                only("return index, queue.release(state)", "return index, queue.advance(state)"),
            ),
        ),
        hangs=True,
    )


def early() -> tuple[Mutant, ...]:
    """One that reads what the producer has not yet written, if the producer is late."""
    return mutants_of(
        (
            (
                "blocks: index before its barrier",
                "The index of an earlier tile.",
                ONE_LIST,
                only("queue.wait_full(state)", "pass", RECEIVE),
            ),
        ),
        racy=True,
    )


def block_listings() -> tuple[Mutant, ...]:
    """Those of the prologue."""
    return mutants_of(
        (
            (
                "block listing: a block less",
                "Visible keys are hidden.",
                ONE_LIST,
                only(
                    "tl.store(entries, tl.maximum(n_listed, 1))",
                    "tl.store(entries, tl.maximum(n_listed - 1, 1))",
                ),
            ),
            (
                "block listing: counter not cleared",
                "Tiles are not computed.",
                ONE_LIST,
                only("tl.store(counter, 0)", "pass"),
            ),
            (
                "block listing: list of the first queries",
                "Another block mask.",
                ONE_LIST,
                only("query_block = m_start // MASK_BLOCK", "query_block = 0 * m_start // MASK_BLOCK"),
            ),
            (
                "block listing: first part alone",
                "Keys of another block.",
                ONE_LIST,
                only("n_block * PARTS + place % PARTS", "n_block * PARTS + 0 * place"),
            ),
            (
                "block listing: no diagonal",
                "Keys near the query are hidden.",
                CAUSAL,
                only("first_key <= last + ", "first_key <= last - BLOCK_N + "),
            ),
            (
                "block listing: narrow window",
                "Keys in the window are hidden.",
                CAUSAL,
                only("stop > first - ", "stop > first + BLOCK_N - "),
            ),
            (
                "block listing: list of the first group",
                "Another block mask.",
                GROUP_LISTS,
                only("m_start_1 = m_start + 1 * GROUP", "m_start_1 = m_start + 0 * GROUP"),
            ),
        )
    )
