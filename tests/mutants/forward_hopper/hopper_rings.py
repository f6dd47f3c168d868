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
            only("gl.where(wraps, phase ^ 1, phase)", "phase"),
            racy=True,
        ),
        Mutant(
            "phases flip one slot early",
            "The last slot of a ring is waited for with the next round's phase.",
            FULL,
            only("gl.where(wraps, phase ^ 1, phase)", "gl.where(stage == STAGES - 2, phase ^ 1, phase)"),
            hangs=True,
        ),
        Mutant(
            "slots never advance",
            "Every tile is looked for in the first slot.",
            FULL,
            only("gl.where(wraps, 0, stage + 1)", "gl.where(wraps, 0, stage)"),
            hangs=True,
        ),
        Mutant(
            "producer waits for what is free",
            "The producer takes empty slots for full ones.",
            FULL,
            only("k_stage, k_phase = 0, 1", "k_stage, k_phase = 0, 0", PRODUCER),
            hangs=True,
        ),
        Mutant(
            "consumers a phase ahead for keys",
            "The first keys count as arrived from the start.",
            FULL,
            only("k_stage, k_phase = 0, 0", "k_stage, k_phase = 0, 1", CONSUMER),
            racy=True,
        ),
        Mutant(
            "consumers a phase ahead for values",
            "The first values count as arrived from the start.",
            FULL,
            only("v_stage, v_phase = 0, 0", "v_stage, v_phase = 0, 1", CONSUMER),
            racy=True,
        ),
        Mutant(
            "queries of the first slot",
            "All tiles of a program are computed from the queries in one slot.",
            FULL,
            only("q_tiles.index(q_stage * GROUPS + GROUP)", "q_tiles.index(GROUP)", times=3),
        ),
        Mutant(
            "hidden blocks not passed by",
            "A group takes blocks that only later groups see for its own.",
            CAUSAL,
            only(
                "hidden = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1 - block",
                "hidden = 0",
                times=2,
            ),
            hangs=True,
        ),
        Mutant(
            "hidden keys passed by without their values",
            "Values run ahead of keys where a group lets a block pass.",
            CAUSAL,
            only(
                "v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)\ntake_turn(GROUP)",
                "take_turn(GROUP)",
                times=2,
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
            only("take_turn(GROUP)\npass_turn(GROUP)", "pass", times=2),
            hangs=True,
        ),
        Mutant(
            "turn not passed on",
            "A group keeps its turn.",
            FULL,
            only("pass_turn(GROUP)", "pass", LATER_BLOCKS),
            hangs=True,
        ),
    )
