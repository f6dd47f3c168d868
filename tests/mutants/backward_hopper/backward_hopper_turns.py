"""Mutants of Hopper backward kernels with a wrong order of dq additions."""

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

AWAIT, PASS = "wait_counter(counter, n_block)", "set_counter(counter, n_block)"
WAIT_TURN = "mbarrier.wait(shared.turn.index(GROUP), number & 1, pred=pred)"
ADDED = "mbarrier.wait(shared.added.index(GROUP)"


def groups() -> tuple[Mutant, ...]:
    """Which group makes which step's dq."""
    last = "if (steps & 1) != GROUP:"
    return (
        *mutants_of(CAUSAL, (
            ("dq of a program's last step left out", last, "if steps < 0:"),
            ("dq of a program's last step twice", last, "if steps > 0:"),
        )),
        *mutants_of(LATE, (
            ("halves: dq of the last step left out", f"{ADD_DQ}, steps - 1, True)", "pass", CONSUMER),
        )),
        *mutants_of(CAUSAL, (
            ("dq before the first step", "if (step > 0) & (", "if (step >= 0) & ("),
            ("dq of the step after", TAKE_DQ, TAKE_DQ.replace("last_state", "ds_state"), CONSUMER, 2),
        ), racy=True),
        *mutants_of(CAUSAL, (
            ("both groups make each step's dq", "if (step > 0) & ((step & 1) != GROUP):", "if step > 0:"),
        ), hangs=True),
    )  # fmt: skip


def order() -> tuple[Mutant, ...]:
    """Blocks of keys add to dq out of their order."""
    add = "atomic_add(address, dq)\nmbarrier.arrive(shared.added.index(GROUP), pred=pred)"
    return (
        *mutants_of(ORDERED_FULL, (
            ("order: turns not waited for", AWAIT, "pass", KEEPER),
            ("order: a group adds without its turn", WAIT_TURN, "pass"),
        ), racy=True),
        *mutants_of(ORDERED, (
            ("order: turns passed before sums are added",
             f"{ADDED}, (step // 2) & 1)\n{PASS}", f"{PASS}\n{ADDED}, (step // 2) & 1)"),
            ("order: turn passed on too early", add, "\n".join(reversed(add.split("\n")))),
        ), racy=True),
        *mutants_of(ORDERED_HALVES, (
            ("order: halves: a group adds without its turn", WAIT_TURN, "pass"),
        ), racy=True),
        *mutants_of(ORDERED_WIDE, (
            ("order: divided: turns not waited for", AWAIT, "pass", KEEPER),
        ), racy=True),
        *mutants_of(ORDERED, (
            ("order: counters not cleared", "tl.store(workspace_2 + tl.program_id(0), 0.0)", "pass", PREPARE),
            ("order: turns never passed", PASS, "pass", KEEPER),
            ("order: every second turn", "[counter, n_block + 1]", "[counter, n_block + 2]"),
            ("order: phases of every step", f"{ADDED}, (step // 2) & 1)", f"{ADDED}, step & 1)"),
            # Where a head's first blocks see nothing, the next one's turns are others'.
            ("order: counters not moved over hidden blocks",
             "2 * m_max - m_min - 1, -1)", "2 * m_max - 1, -1)", KEEPER),
        ), hangs=True),
        *mutants_of(ORDERED_HALVES, (
            ("order: halves: one counter not cleared",
             "* 2 + tl.arange(0, 2)", "* 2 + tl.arange(0, 2) * 0", PREPARE),
            ("order: halves: one counter for both", "* 2 + GROUP) * 4", "* 2) * 4", KEEPER),
        ), hangs=True),
        *mutants_of(ORDERED_FULL, (
            ("order: last blocks of keys first",
             "n_block = number // interleaved", "n_block = self.blocks - 1 - number // interleaved"),
        ), hangs=True),
    )  # fmt: skip
