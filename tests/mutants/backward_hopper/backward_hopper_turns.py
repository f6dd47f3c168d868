"""Mutants of Hopper backward kernels with a wrong order of dq additions."""

from __future__ import annotations

from tests.mutants.backward_hopper.backward_hopper import (
    ADD_DQ,
    CAUSAL,
    CONSUMER,
    KEEPER,
    LATE,
    ORDERED,
    ORDERED_FULL,
    ORDERED_HALVES,
    ORDERED_WIDE,
    PREPARE,
    TAKE_DQ,
)
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import only

AWAIT, PASS = "wait_counter(counter, n_block)", "set_counter(counter, n_block)"
WAIT_TURN = "mbarrier.wait(shared.turn.index(GROUP), number & 1, pred=pred)"
ADDED = "mbarrier.wait(shared.added.index(GROUP)"


def groups() -> tuple[Mutant, ...]:
    """Which group makes which step's dq."""
    last = "if (steps & 1) != GROUP:"
    return (
        *mutants_of((
            ("dq of a program's last step left out", "No group adds the sums of the last step.", CAUSAL,
             only(last, "if steps < 0:")),
            ("dq of a program's last step twice", "Both groups add the sums of the last step.", CAUSAL,
             only(last, "if steps > 0:")),
            ("halves: dq of the last step left out", "No group adds the sums of the last step.", LATE,
             only(f"{ADD_DQ}, steps - 1, True)", "pass", CONSUMER)),
        )),
        *mutants_of((
            ("dq before the first step", "A step that was not is added.", CAUSAL,
             only("if (step > 0) & (", "if (step >= 0) & (")),
            ("dq of the step after", "Incomplete sums are added.", CAUSAL,
             only(TAKE_DQ, TAKE_DQ.replace("last_state", "ds_state"), CONSUMER, 2)),
        ), racy=True),
        *mutants_of((
            ("both groups make each step's dq", "A step's room is given back twice.", CAUSAL,
             only("if (step > 0) & ((step & 1) != GROUP):", "if step > 0:")),
        ), hangs=True),
    )  # fmt: skip


def order() -> tuple[Mutant, ...]:
    """Blocks of keys add to dq out of their order."""
    add = "atomic_add(address, dq)\nmbarrier.arrive(shared.added.index(GROUP), pred=pred)"
    return (
        *mutants_of((
            ("order: turns not waited for", "Blocks of keys add to dq as they come.", ORDERED_FULL,
             only(AWAIT, "pass", KEEPER)),
            ("order: turns passed before sums are added",
             "The next block may add before this one has.", ORDERED,
             only(f"{ADDED}, (step // 2) & 1)\n{PASS}", f"{PASS}\n{ADDED}, (step // 2) & 1)")),
            ("order: a group adds without its turn", "Other warps do not wait for the turn.", ORDERED_FULL,
             only(WAIT_TURN, "pass")),
            ("order: turn passed on too early", "The turn is passed on before the addition.", ORDERED,
             only(add, "\n".join(reversed(add.split("\n"))))),
            ("order: halves: a group adds without its turn", "Halves of dq are added as they come.",
             ORDERED_HALVES, only(WAIT_TURN, "pass")),
            ("order: divided: turns not waited for", "So where groups divide the products.", ORDERED_WIDE,
             only(AWAIT, "pass", KEEPER)),
        ), racy=True),
        *mutants_of((
            ("order: counters not cleared", "Turns are counted from the contents of memory.", ORDERED,
             only("tl.store(workspace_2 + tl.program_id(0), 0.0)", "pass", PREPARE)),
            ("order: halves: one counter not cleared", "The second half's turns are counted from anywhere.",
             ORDERED_HALVES, only("* 2 + tl.arange(0, 2)", "* 2 + tl.arange(0, 2) * 0", PREPARE)),
            ("order: turns never passed", "The second block of keys never stops waiting.", ORDERED,
             only(PASS, "pass", KEEPER)),
            ("order: every second turn", "A turn is passed to the block after the next.", ORDERED,
             only("[counter, n_block + 1]", "[counter, n_block + 2]")),
            ("order: phases of every step", "Barriers are waited for as if a group had each step's turn.",
             ORDERED, only(f"{ADDED}, (step // 2) & 1)", f"{ADDED}, step & 1)")),
            ("order: halves: one counter for both", "Groups wait for each other's turns.", ORDERED_HALVES,
             only("* 2 + GROUP) * 4", "* 2) * 4", KEEPER)),
            ("order: last blocks of keys first",
             "Programs wait for those that start after them.", ORDERED_FULL,
             only("n_block = number // interleaved", "n_block = self.blocks - 1 - number // interleaved")),
            ("order: counters not moved over hidden blocks",
             "Where a head's first blocks see nothing, the next one's turns are others'.", ORDERED,
             only("2 * m_max - m_min - 1, -1)", "2 * m_max - 1, -1)", KEEPER)),
        ), hangs=True),
    )  # fmt: skip
