"""Mutants of Hopper kernels with wrong waits or releases."""

from tests.mutants.core import Mutant, Part, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import (
    CONSUMER,
    EAGER,
    END_OF_TILE,
    FULL,
    LAST_PRODUCT,
    LATER_BLOCKS,
    SHORT_RINGS,
    STORE,
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
        *mutants_of(FULL, (
            ("first keys not waited for", "k.wait_full(k_state, pred=more)", "pass"),
            ("later keys not waited for", WAIT_K, "pass", LATER_BLOCKS),
            ("values not waited for", WAIT_V, "pass", LATER_BLOCKS),
            ("last values not waited for", WAIT_V, "pass", LAST_PRODUCT),
            ("queries not waited for", "q.wait_full(q_state, GROUP, pred=more)", "pass"),
            ("scores read before they are done", SCORES_DONE, "s = warpgroup_mma_wait(2, deps=[s])"),
            ("outputs read before they are done",
             OUTPUT_DONE, "accumulator = warpgroup_mma_wait(1, deps=[accumulator])", END_OF_TILE),
            ("half a tile counts as a whole",
             "mbarrier.expect(k.full.index(k_state.stage), 32768)",
             "mbarrier.expect(k.full.index(k_state.stage), 16384)"),
        ), racy=True),
        *mutants_of(EAGER, (
            ("nothing waited for",
             (Patch(WAIT_K, "pass", CONSUMER),
              Patch(WAIT_V, "pass", CONSUMER, 2),
              Patch("k.wait_full(k_state, pred=more)", "pass"),
              Patch("q.wait_full(q_state, GROUP, pred=more)", "pass"))),
        ), racy=True),
        *mutants_of(FULL, (
            ("more bytes awaited than come",
             "mbarrier.expect(v.full.index(v_state.stage), 32768)",
             "mbarrier.expect(v.full.index(v_state.stage), 32784)"),
            ("keys of a tile that does not come", "k.wait_full(k_state, pred=more)", WAIT_K),
        ), hangs=True),
    )  # fmt: skip


def releases() -> tuple[Mutant, ...]:
    """A slot is given back too early, too often or never."""
    return (
        *mutants_of(EAGER, (
            ("keys given back before they are read",
             f"{SCORES_DONE}\n{ARRIVE_K}", f"{ARRIVE_K}\n{SCORES_DONE}", LATER_BLOCKS),
            ("values given back before they are read",
             (Patch(f"{OUTPUT_DONE}\n{ARRIVE_V}", OUTPUT_DONE, LATER_BLOCKS),
              Patch(WEIGHTED, f"{WEIGHTED}\n{ARRIVE_V}", LATER_BLOCKS))),
        ), racy=True),
        *mutants_of(SHORT_RINGS, (
            ("queries given back before they are read",
             (Patch(ARRIVE_Q, "q_state = q.advance(q_state)"),
              Patch("for n_block in range(",
                    "mbarrier.arrive(q.empty.index(q.slot(q_state, GROUP)))\nfor n_block in range("))),
        )),
        *mutants_of(FULL, (
            # One group's word frees a slot that the other still reads.
            ("keys given back by one group for both",
             "mbarrier.init(k_empty.index(slot), count=GROUPS)",
             "mbarrier.init(k_empty.index(slot), count=GROUPS - 1)"),
            ("values given back by one group for both",
             "mbarrier.init(v_empty.index(slot), count=GROUPS)",
             "mbarrier.init(v_empty.index(slot), count=GROUPS - 1)"),
            ("output not waited for at the end",
             "warpgroup_mma_wait(0, deps=[s])\ntma.store_wait(0)", "warpgroup_mma_wait(0, deps=[s])"),
            ("no fence before the store", "fence_async_shared()", "pass", STORE),
        ), racy=True),
        *mutants_of(FULL, (
            ("queries never given back", ARRIVE_Q, "q_state = q.advance(q_state)"),
            ("keys never given back", ARRIVE_K, "k_state = k.advance(k_state)", LATER_BLOCKS),
            ("last values never given back", ARRIVE_V, "v_state = v.advance(v_state)", END_OF_TILE),
        ), hangs=True),
        *mutants_of(HALVED, (
            ("output overwritten before it is stored", "tma.store_wait(0)", "pass", FIRST_HALF, 2),
        ), racy=True),
        *mutants_of(IN_PARTS, (
            ("no fence before a store in parts", "fence_async_shared()", "pass", STORE, 2),
        ), racy=True),
    )  # fmt: skip
