"""Mutants of Hopper kernels with wrong counts of slots, phases, turns or blocks."""

from __future__ import annotations

from tests.mutants.core import Mutant
from tests.mutants.forward_hopper.hopper import CAUSAL, CONSUMER, FULL, LATER_BLOCKS, PRODUCER, only


def rings() -> tuple[Mutant, ...]:
    """Slots, phases, turns and blocks that pass by."""
    return (
        Mutant(
            "phases never flip",
            "A barrier counts as complete from its second round on.",
            FULL,
            only("gl.where(wraps, state.phase ^ 1, state.phase)", "state.phase"),
            racy=True,
        ),
        Mutant(
            "phases flip one slot early",
            "The last slot of a ring is waited for with the next round's phase.",
            FULL,
            only(
                "gl.where(wraps, state.phase ^ 1, state.phase)",
                "gl.where(state.stage == self.stages - 2, state.phase ^ 1, state.phase)",
            ),
            hangs=True,
        ),
        Mutant(
            "slots never advance",
            "Every tile is looked for in the first slot.",
            FULL,
            only("gl.where(wraps, 0, state.stage + 1)", "gl.where(wraps, 0, state.stage)"),
            hangs=True,
        ),
        Mutant(
            "producer waits for slots that are free",
            "The producer takes empty slots for full ones.",
            FULL,
            only("k_state = start_pipeline(1)", "k_state = start_pipeline(0)", PRODUCER),
            hangs=True,
        ),
        Mutant(
            "consumers a phase ahead for keys",
            "The first keys count as arrived from the start.",
            FULL,
            only("k_state = start_pipeline(0)", "k_state = start_pipeline(1)", CONSUMER),
            racy=True,
        ),
        Mutant(
            "consumers a phase ahead for values",
            "The first values count as arrived from the start.",
            FULL,
            only("v_state = start_pipeline(0)", "v_state = start_pipeline(1)", CONSUMER),
            racy=True,
        ),
        Mutant(
            "queries of the first slot",
            "All tiles of a program are computed from the queries in one slot.",
            FULL,
            only("index(q.slot(q_state, GROUP))", "index(GROUP)"),
        ),
        Mutant(
            "hidden blocks not passed by",
            "A group takes blocks that only later groups see for its own.",
            CAUSAL,
            only(
                "hidden = get_n_block_max(tile, tile.m_block * TILE_POSITIONS, TILE_POSITIONS) - 1 - n_last",
                "hidden = 0",
            ),
            hangs=True,
        ),
        Mutant(
            "hidden keys passed by without their values",
            "Values run ahead of keys where a group lets a block pass.",
            CAUSAL,
            only(
                "v_state = v.release(v_state)\nwait_named_barrier(GROUP)",
                "mbarrier.arrive(v.empty.index(v_state.stage))\nwait_named_barrier(GROUP)",
            ),
            hangs=True,
        ),
        Mutant(
            "hidden blocks of a tile that does not come",
            "After a program's last tile blocks of another are waited for.",
            CAUSAL,
            only("gl.where(more, hidden, 0)", "hidden"),
            hangs=True,
        ),
        Mutant(
            "no turn where a block is passed by",
            "Groups that let a block pass miss their turn.",
            CAUSAL,
            only("wait_named_barrier(GROUP)\nsignal_named_barrier(GROUP)", "pass"),
            hangs=True,
        ),
        Mutant(
            "turn not passed on",
            "A group keeps its turn.",
            FULL,
            only("signal_named_barrier(GROUP)", "pass", LATER_BLOCKS),
            hangs=True,
        ),
    )
