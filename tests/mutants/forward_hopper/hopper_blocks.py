"""Mutants of Hopper kernels with a block mask, and of the prologue that lists its blocks."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import PRODUCER, a_small_problem, subject

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
    return (
        *mutants_of(ONE_LIST, (
            ("blocks: a tile is passed over",
             "num_programs + read_ticket(ticket)", "num_programs + 1 + read_ticket(ticket)", PRODUCER),
            ("blocks: lists of head 0", "head = gl.minimum(", "head = 0 * gl.minimum("),
            ("blocks: lists of batch 0", "batch = gl.minimum(tile", "batch = 0 * gl.minimum(tile"),
        )),
        *mutants_of(ONE_LIST, (
            ("blocks: index never released",
             "return index, queue.release(state)", "return index, queue.advance(state)"),
        ), hangs=True),
    )  # fmt: skip


def early() -> tuple[Mutant, ...]:
    """One that reads what the producer has not yet written, if the producer is late."""
    return mutants_of(ONE_LIST, (
        ("blocks: index before its barrier", "queue.wait_full(state)", "pass", RECEIVE),
    ), racy=True)  # fmt: skip


def block_listings() -> tuple[Mutant, ...]:
    """Those of the prologue."""
    return (
        *mutants_of(ONE_LIST, (
            ("block listing: a block less",
             "tl.store(entries, tl.maximum(n_listed, 1))", "tl.store(entries, tl.maximum(n_listed - 1, 1))"),
            ("block listing: counter not cleared", "tl.store(counter, 0)", "pass"),
            ("block listing: list of the first queries",
             "query_block = m_start // MASK_BLOCK", "query_block = 0 * m_start // MASK_BLOCK"),
            ("block listing: first part alone",
             "n_block * PARTS + place % PARTS", "n_block * PARTS + 0 * place"),
        )),
        *mutants_of(CAUSAL, (
            ("block listing: no diagonal", "first_key <= last + ", "first_key <= last - BLOCK_N + "),
            ("block listing: narrow window", "stop > first - ", "stop > first + BLOCK_N - "),
        )),
        *mutants_of(GROUP_LISTS, (
            ("block listing: list of the first group",
             "m_start_1 = m_start + 1 * GROUP", "m_start_1 = m_start + 0 * GROUP"),
        )),
    )  # fmt: skip
