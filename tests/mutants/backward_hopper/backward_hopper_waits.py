"""Mutants of Hopper backward kernels with wrong waits, releases or phases."""

from tests.mutants.backward_hopper.backward_hopper import (
    BEFORE_STEPS,
    CAUSAL,
    CONSUMER,
    DQ,
    FULL,
    HALVES,
    LATE,
    NARROW,
    PRODUCER,
    STEPS,
    WIDE,
)
from tests.mutants.backward_hopper.backward_hopper_figures import OF_DK
from tests.mutants.backward_hopper.backward_hopper_places import COPY_DK
from tests.mutants.core import Mutant, Patch, mutants_of

WAIT_Q = "mbarrier.wait(shared.q_full.index(q_state.stage), q_state.phase, pred=step + 1 < steps)"
WAIT_DOUT = "mbarrier.wait(shared.do_full.index(do_state.stage), do_state.phase)"
GIVE_Q, GIVE_DOUT = (
    "mbarrier.arrive(shared.q_empty.index(q_state.stage))",
    "mbarrier.arrive(shared.do_empty.index(do_state.stage))",
)
STORE_DS = "shared.ds_tiles.index(GROUP * DS_STAGES + ds_state.stage).store(ds)"
TELL_DS = "mbarrier.arrive(shared.ds_full.index(GROUP * DS_STAGES + ds_state.stage))"
ROOM_FOR_DS = "mbarrier.wait(shared.ds_empty.index(ds_state.stage), ds_state.phase ^ 1)"
FENCE = "fence_async_shared()"
STATE = "{} = PipelineState(gl.to_tensor(0), gl.to_tensor({}))"
LOAD_P = "p = shared.p_tiles.index(p_state.stage).load(S_LAYOUT).to(gl.float32)"
GIVE_P = "mbarrier.arrive(shared.p_empty.index(p_state.stage))"
GIVE_DS = "mbarrier.arrive(shared.ds_empty.index(last_state.stage))"


def waits() -> tuple[Mutant, ...]:
    """A tile is used before it has arrived."""
    zeros = "shared.ds_tiles.index({}).store(gl.zeros([ROWS, BLOCK_M], DTYPE, S_LAYOUT))"
    return (
        *mutants_of(CAUSAL, (
            ("first queries not waited for", "mbarrier.wait(shared.q_full.index(0), 0)", "pass"),
            ("dout not waited for", WAIT_DOUT, "pass", None, 2),
            ("nothing waited for before the first scores",
             (Patch("mbarrier.wait(shared.kv_full.index(2 * GROUP), 0)", "pass"),
              Patch("mbarrier.wait(shared.kv_full.index(2 * (1 - GROUP)), 0)", "pass"),
              Patch("mbarrier.wait(shared.q_full.index(0), 0)", "pass"))),
            ("neither values nor dout waited for",
             (Patch("mbarrier.wait(shared.kv_full.index(2 * GROUP + 1), 0)", "pass"),
              Patch(WAIT_DOUT, "pass", None, 2))),
            ("room for dS not waited for", ROOM_FOR_DS, "pass"),
            # The barrier of a tile of queries does not count its row.
            ("statistics' bytes forgotten",
             "mbarrier.expect(shared.q_full.index(q_state.stage), QUERY_BYTES)",
             "mbarrier.expect(shared.q_full.index(q_state.stage), KEY_BYTES)"),
            ("no fence behind dS", FENCE, "pass", STEPS),
            ("no fence before dk leaves", f"{FENCE}\n{COPY_DK}", COPY_DK),
        ), racy=True),
        *mutants_of(HALVES, (
            ("halves: the other group's dS not waited for",
             "mbarrier.wait(shared.ds_full.index(slot), ds_state.phase)",
             "mbarrier.wait(shared.ds_full.index(slot), ds_state.phase, pred=turn == 0)", DQ),
        ), racy=True),
        *mutants_of(LATE, (
            ("halves: room for dS not waited for", ROOM_FOR_DS, "pass"),
            ("halves: no zeros before the first step", zeros.format("GROUP * DS_STAGES"), "pass"),
        ), racy=True),
        *mutants_of(WIDE, (
            ("divided: no zeros before the first step", zeros.format(0), "pass"),
            ("divided: weights not waited for",
             "mbarrier.wait(shared.p_full.index(p_state.stage), p_state.phase)", "pass"),
            # Keys that the other group may read are overwritten by dk.
            ("divided: the other group not waited for", "mbarrier.wait(shared.done.index(0), 0)", "pass"),
        ), racy=True),
    )  # fmt: skip


def releases() -> tuple[Mutant, ...]:
    """Room is given back too early."""
    return (
        *mutants_of(CAUSAL, (
            ("queries given back before they are read",
             (Patch(GIVE_Q, "pass", STEPS),
              Patch(OF_DK, f"{GIVE_Q}\n{OF_DK}"))),
            ("queries given back by one group for both",
             "q_empty = make_barriers(Q_STAGES, 2)", "q_empty = make_barriers(Q_STAGES, 1)"),
            ("dout given back by one group for both",
             "do_empty = make_barriers(DO_STAGES, 2)", "do_empty = make_barriers(DO_STAGES, 1)"),
            ("dS of another slot given back", GIVE_DS, GIVE_DS.replace("last", "ds")),
            ("dv overwritten before it is stored",
             "low_dk = (dk * scale).to(DTYPE)\ntma.store_wait(0)", "low_dk = (dk * scale).to(DTYPE)"),
            ("consumers a phase ahead for dout",
             STATE.format("do_state", 0), STATE.format("do_state", 1), BEFORE_STEPS),
            ("consumers a phase ahead for queries",
             STATE.format("q_state", 0), STATE.format("q_state", 1), BEFORE_STEPS),
        ), racy=True),
        *mutants_of(NARROW, (
            ("dout given back before it is read",
             (Patch(GIVE_DOUT, "pass", STEPS),
              Patch("v_tile = shared.v_tiles.index(opaque(GROUP))",
                    f"{GIVE_DOUT}\nv_tile = shared.v_tiles.index(opaque(GROUP))"))),
        ), racy=True),
        *mutants_of(LATE, (
            ("halves: dS given back by one group for both",
             "ds_empty = make_barriers(DS_STAGES, 2)", "ds_empty = make_barriers(DS_STAGES, 1)"),
        ), racy=True),
        *mutants_of(HALVES, (
            ("dS announced before it is stored",
             f"{STORE_DS}\n{FENCE}\n{TELL_DS}", f"{TELL_DS}\n{STORE_DS}\n{FENCE}"),
        ), racy=True),
        *mutants_of(WIDE, (
            ("divided: weights given back before they are read",
             f"{LOAD_P}\n{GIVE_P}", f"{GIVE_P}\n{LOAD_P}"),
        ), racy=True),
        *mutants_of(FULL, (
            # A barrier counts as complete from its second round on.
            ("phases never flip", "gl.where(wraps, self.phase ^ 1, self.phase)", "self.phase"),
        ), racy=True),
    )  # fmt: skip


def endless() -> tuple[Mutant, ...]:
    """Mutants that wait for an arrival that does not come."""
    return (
        *mutants_of(CAUSAL, (
            # Behind its last block a program waits for another.
            ("queries of a block that does not come",
             WAIT_Q, "mbarrier.wait(shared.q_full.index(q_state.stage), q_state.phase)"),
            ("queries never given back", GIVE_Q, "pass", STEPS),
            ("dS never given back", GIVE_DS, "pass", CONSUMER),
            ("more bytes awaited than come",
             "mbarrier.expect(shared.do_full.index(do_state.stage), QUERY_BYTES)",
             "mbarrier.expect(shared.do_full.index(do_state.stage), QUERY_BYTES + 16)"),
            ("slots never advance", "gl.where(wraps, 0, self.stage + 1)", "gl.where(wraps, 0, self.stage)"),
            # The last slot of a ring is waited for with the next round's phase.
            ("phases flip one slot early",
             "gl.where(wraps, self.phase ^ 1, self.phase)", "gl.where(wraps, self.phase, self.phase ^ 1)"),
            ("producer waits for slots that are free",
             STATE.format("q_state", 1), STATE.format("q_state", 0), PRODUCER),
        ), hangs=True),
        *mutants_of(WIDE, (
            ("divided: weights in the slot of gradients",
             "ds_state = p_state.next(DS_STAGES)", "ds_state = p_state"),
            ("divided: steps of groups differ",
             "for step in range(steps):", "for step in range(steps - GROUP):", CONSUMER),
        ), hangs=True),
    )  # fmt: skip
