"""Mutants of Hopper kernels with wrong waits or releases."""

from __future__ import annotations

from tests.mutants.core import Mutant, Part, Patch
from tests.mutants.forward_hopper.hopper import (
    CONSUMER,
    EAGER,
    END_OF_TILE,
    FULL,
    LAST_PRODUCT,
    LATER_BLOCKS,
    SHORT_RINGS,
    STORE,
    only,
)
from tests.mutants.forward_hopper.hopper_places import HALVED, IN_PARTS

WAIT_K = "k.wait_full(k_state)"
WAIT_V = "v.wait_full(v_state)"
ARRIVE_K = "k_state = k.release(k_state)"
ARRIVE_V = "v_state = v.release(v_state)"
ARRIVE_Q = "q_state = q.release(q_state, GROUP)"
SCORES_DONE = "s = warpgroup_mma_wait(1, deps=[s])"
OUTPUT_DONE = "accumulator = warpgroup_mma_wait(0, deps=[accumulator])"
WEIGHTED = "accumulator = issue_pv(p, v, v_state, accumulator)"
FIRST_HALF = Part("# Both halves", "[tile.batch, tile.kv_head, tile.head, m_start, 128]")


def waits() -> tuple[Mutant, ...]:
    """A tile is used before it has arrived, or a result before it is there."""
    return (
        Mutant(
            "first keys not waited for",
            "A tile's first scores are of whatever lies where its keys will be.",
            FULL,
            only("k.wait_full(k_state, pred=more)", "pass"),
            racy=True,
        ),
        Mutant(
            "later keys not waited for",
            "Scores of all blocks but the first may be of keys that have not arrived.",
            FULL,
            only(WAIT_K, "pass", LATER_BLOCKS),
            racy=True,
        ),
        Mutant(
            "values not waited for",
            "Weights of all blocks but the last may meet values that have not arrived.",
            FULL,
            only(WAIT_V, "pass", LATER_BLOCKS),
            racy=True,
        ),
        Mutant(
            "last values not waited for",
            "Weights of a tile's last block may meet values that have not arrived.",
            FULL,
            only(WAIT_V, "pass", LAST_PRODUCT),
            racy=True,
        ),
        Mutant(
            "queries not waited for",
            "A tile's first scores may be of queries that have not arrived.",
            FULL,
            only("q.wait_full(q_state, GROUP, pred=more)", "pass"),
            racy=True,
        ),
        Mutant(
            "nothing waited for",
            "Keys, values and queries are used whether they have arrived or not.",
            EAGER,
            (
                Patch(WAIT_K, "pass", CONSUMER),
                Patch(WAIT_V, "pass", CONSUMER, 2),
                Patch("k.wait_full(k_state, pred=more)", "pass"),
                Patch("q.wait_full(q_state, GROUP, pred=more)", "pass"),
            ),
            racy=True,
        ),
        Mutant(
            "scores read before they are done",
            "The product of queries and keys is not waited for.",
            FULL,
            only(SCORES_DONE, "s = warpgroup_mma_wait(2, deps=[s])"),
            racy=True,
        ),
        Mutant(
            "outputs read before they are done",
            "The last product of weights and values is not waited for.",
            FULL,
            only(OUTPUT_DONE, "accumulator = warpgroup_mma_wait(1, deps=[accumulator])", END_OF_TILE),
            racy=True,
        ),
        Mutant(
            "half a tile counts as a whole",
            "The barrier of a tile of keys expects half of its bytes.",
            FULL,
            only(
                "mbarrier.expect(k.full.index(k_state.stage), 32768)",
                "mbarrier.expect(k.full.index(k_state.stage), 16384)",
            ),
            racy=True,
        ),
        Mutant(
            "more bytes awaited than come",
            "The barrier of a tile of values expects bytes that are not copied.",
            FULL,
            only(
                "mbarrier.expect(v.full.index(v_state.stage), 32768)",
                "mbarrier.expect(v.full.index(v_state.stage), 32784)",
            ),
            hangs=True,
        ),
        Mutant(
            "keys of a tile that does not come",
            "After a program's last tile the keys of another are waited for.",
            FULL,
            only("k.wait_full(k_state, pred=more)", WAIT_K),
            hangs=True,
        ),
    )


def releases() -> tuple[Mutant, ...]:
    """A slot is given back too early, too often or never."""
    return (
        Mutant(
            "keys given back before they are read",
            "Keys may be overwritten while scores are made of them.",
            EAGER,
            only(f"{SCORES_DONE}\n{ARRIVE_K}", f"{ARRIVE_K}\n{SCORES_DONE}", LATER_BLOCKS),
            racy=True,
        ),
        Mutant(
            "values given back before they are read",
            "Values may be overwritten while weights meet them.",
            EAGER,
            (
                Patch(f"{OUTPUT_DONE}\n{ARRIVE_V}", OUTPUT_DONE, LATER_BLOCKS),
                Patch(WEIGHTED, f"{WEIGHTED}\n{ARRIVE_V}", LATER_BLOCKS),
            ),
            racy=True,
        ),
        Mutant(
            "queries given back before they are read",
            "Queries of the next tile overwrite those that are still in use.",
            SHORT_RINGS,
            (
                Patch(ARRIVE_Q, "q_state = q.advance(q_state)"),
                Patch(
                    "for n_block in range(",
                    "mbarrier.arrive(q.empty.index(q.slot(q_state, GROUP)))\nfor n_block in range(",
                ),
            ),
        ),
        Mutant(
            "keys given back by one group for both",
            "One group's word frees a slot that the other still reads.",
            FULL,
            only(
                "mbarrier.init(k_empty.index(slot), count=GROUPS)",
                "mbarrier.init(k_empty.index(slot), count=GROUPS - 1)",
            ),
            racy=True,
        ),
        Mutant(
            "values given back by one group for both",
            "One group's word frees a slot that the other still reads.",
            FULL,
            only(
                "mbarrier.init(v_empty.index(slot), count=GROUPS)",
                "mbarrier.init(v_empty.index(slot), count=GROUPS - 1)",
            ),
            racy=True,
        ),
        Mutant(
            "queries never given back",
            "A program's tiles run out of room for queries.",
            FULL,
            only(ARRIVE_Q, "q_state = q.advance(q_state)"),
            hangs=True,
        ),
        Mutant(
            "keys never given back",
            "A tile of keys is never overwritten.",
            FULL,
            only(ARRIVE_K, "k_state = k.advance(k_state)", LATER_BLOCKS),
            hangs=True,
        ),
        Mutant(
            "last values never given back",
            "The last values of each tile are never overwritten.",
            FULL,
            only(ARRIVE_V, "v_state = v.advance(v_state)", END_OF_TILE),
            hangs=True,
        ),
        Mutant(
            "output overwritten before it is stored",
            "The second half of an output is put where the first is being copied from.",
            HALVED,
            only("tma.store_wait(0)", "pass", FIRST_HALF, 2),
            racy=True,
        ),
        Mutant(
            "output not waited for at the end",
            "A program may end before its last output is stored.",
            FULL,
            only(
                "warpgroup_mma_wait(0, deps=[s])\ntma.store_wait(0)",
                "warpgroup_mma_wait(0, deps=[s])",
            ),
            racy=True,
        ),
        Mutant(
            "no fence before the store",
            "The copy engine may read an output before it is in shared memory.",
            FULL,
            only("fence_async_shared()", "pass", STORE),
            racy=True,
        ),
        Mutant(
            "no fence before a store in parts",
            "The copy engine may read a part of an output before it is in shared memory.",
            IN_PARTS,
            only("fence_async_shared()", "pass", STORE, 2),
            racy=True,
        ),
    )
