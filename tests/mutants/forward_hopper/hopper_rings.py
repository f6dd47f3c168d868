"""Mutants of Hopper kernels with wrong counts of slots, phases, turns or blocks."""

from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import CAUSAL, CONSUMER, FULL, LATER_BLOCKS, PRODUCER


def rings() -> tuple[Mutant, ...]:
    """Slots, phases, turns and blocks that pass by."""
    return (
        *mutants_of(FULL, (
            # A barrier counts as complete from its second round on.
            ("phases never flip", "gl.where(wraps, state.phase ^ 1, state.phase)", "state.phase"),
            ("consumers a phase ahead for keys",
             "k_state = start_pipeline(0)", "k_state = start_pipeline(1)", CONSUMER),
            ("consumers a phase ahead for values",
             "v_state = start_pipeline(0)", "v_state = start_pipeline(1)", CONSUMER),
        ), racy=True),
        *mutants_of(FULL, (
            # The last slot of a ring is waited for with the next round's phase.
            ("phases flip one slot early",
             "gl.where(wraps, state.phase ^ 1, state.phase)",
             "gl.where(state.stage == self.stages - 2, state.phase ^ 1, state.phase)"),
            ("slots never advance", "gl.where(wraps, 0, state.stage + 1)", "gl.where(wraps, 0, state.stage)"),
            ("producer waits for slots that are free",
             "k_state = start_pipeline(1)", "k_state = start_pipeline(0)", PRODUCER),
            ("turn not passed on", "signal_named_barrier(GROUP)", "pass", LATER_BLOCKS),
        ), hangs=True),
        *mutants_of(FULL, (
            ("queries of the first slot", "index(q.slot(q_state, GROUP))", "index(GROUP)"),
        )),
        *mutants_of(CAUSAL, (
            ("hidden blocks not passed by",
             "hidden = get_n_block_max(tile, tile.m_block * TILE_POSITIONS, TILE_POSITIONS) - 1 - n_last",
             "hidden = 0"),
            # Values run ahead of keys where a group lets a block pass.
            ("hidden keys passed by without their values",
             "v_state = v.release(v_state)\nwait_named_barrier(GROUP)",
             "mbarrier.arrive(v.empty.index(v_state.stage))\nwait_named_barrier(GROUP)"),
            ("hidden blocks of a tile that does not come", "gl.where(more, hidden, 0)", "hidden"),
            ("no turn where a block is passed by",
             "wait_named_barrier(GROUP)\nsignal_named_barrier(GROUP)", "pass"),
        ), hangs=True),
    )  # fmt: skip
