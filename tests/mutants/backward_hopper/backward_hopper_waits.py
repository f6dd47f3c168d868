"""Mutants of Hopper backward kernels with wrong waits, releases or phases."""

from __future__ import annotations

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
from tests.mutants.forward_hopper.hopper import only

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
GIVE_DS = "mbarrier.arrive(shared.ds_empty.index(last_state.stage))"


def waits() -> tuple[Mutant, ...]:
    """A tile is used before it has arrived."""
    zeros = "shared.ds_tiles.index({}).store(gl.zeros([ROWS, BLOCK_M], DTYPE, S_LAYOUT))"
    return mutants_of((
        ("first queries not waited for",
         "A program's first scores are of whatever lies in the queries' room.",
         CAUSAL, only("mbarrier.wait(shared.q_full.index(0), 0)", "pass")),
        ("dout not waited for", "The output's gradients are used whether they have arrived or not.", CAUSAL,
         only(WAIT_DOUT, "pass", times=2)),
        ("nothing waited for before the first scores", "They are of whatever lies where tiles will be.",
         CAUSAL, (*only("mbarrier.wait(shared.kv_full.index(2 * GROUP), 0)", "pass"),
                  *only("mbarrier.wait(shared.kv_full.index(2 * (1 - GROUP)), 0)", "pass"),
                  *only("mbarrier.wait(shared.q_full.index(0), 0)", "pass"))),
        ("neither values nor dout waited for", "Products are of whatever lies where both will be.",
         CAUSAL, (*only("mbarrier.wait(shared.kv_full.index(2 * GROUP + 1), 0)", "pass"),
                  Patch(WAIT_DOUT, "pass", times=2))),
        ("halves: the other group's dS not waited for",
         "Values from before the other group's store count in dq.", HALVES,
         only("mbarrier.wait(shared.ds_full.index(slot), ds_state.phase)",
              "mbarrier.wait(shared.ds_full.index(slot), ds_state.phase, pred=turn == 0)", DQ)),
        ("room for dS not waited for", "A group may overwrite dS while dq is made of it.", CAUSAL,
         only(ROOM_FOR_DS, "pass")),
        ("halves: room for dS not waited for",
         "A group may overwrite dS while the other makes dq of it.", LATE,
         only(ROOM_FOR_DS, "pass")),
        ("halves: no zeros before the first step",
         "The first dq that is added is of whatever lies there.", LATE,
         only(zeros.format("GROUP * DS_STAGES"), "pass")),
        ("divided: no zeros before the first step",
         "The first dq that is added is of whatever lies there.", WIDE,
         only(zeros.format(0), "pass")),
        ("divided: weights not waited for",
         "Weights that the other group has not stored yet count in dS.", WIDE,
         only("mbarrier.wait(shared.p_full.index(p_state.stage), p_state.phase)", "pass")),
        ("divided: the other group not waited for",
         "Keys that the other group may read are overwritten by dk.", WIDE,
         only("mbarrier.wait(shared.done.index(0), 0)", "pass")),
        ("statistics' bytes forgotten", "The barrier of a tile of queries does not know of its row.", CAUSAL,
         only("mbarrier.expect(shared.q_full.index(q_state.stage), QUERY_BYTES)",
              "mbarrier.expect(shared.q_full.index(q_state.stage), KEY_BYTES)")),
        ("no fence behind dS", "Values from before the store to shared memory may count in dq.", CAUSAL,
         only(FENCE, "pass", STEPS)),
        ("no fence before dk leaves", "The copy engine may read dk before it is in shared memory.", CAUSAL,
         only(f"{FENCE}\n{COPY_DK}", COPY_DK)),
    ), racy=True)  # fmt: skip


def releases() -> tuple[Mutant, ...]:
    """Room is given back too early."""
    return mutants_of((
        ("queries given back before they are read",
         "Queries may be overwritten while dk is made of them.", CAUSAL,
         (*only(GIVE_Q, "pass", STEPS), *only(OF_DK, f"{GIVE_Q}\n{OF_DK}"))),
        ("dout given back before it is read",
         "It may be overwritten while dP and dv are made of it.", NARROW,
         (Patch(GIVE_DOUT, "pass", STEPS),
          *only("v_tile = shared.v_tiles.index(opaque(GROUP))",
                f"{GIVE_DOUT}\nv_tile = shared.v_tiles.index(opaque(GROUP))"))),
        ("queries given back by one group for both",
         "One group's word frees room that the other still reads.",
         CAUSAL, only("q_empty = make_barriers(Q_STAGES, 2)", "q_empty = make_barriers(Q_STAGES, 1)")),
        ("dout given back by one group for both", "One group's word frees room that the other still reads.",
         CAUSAL, only("do_empty = make_barriers(DO_STAGES, 2)", "do_empty = make_barriers(DO_STAGES, 1)")),
        ("halves: dS given back by one group for both",
         "One group's word frees dS that the other still reads.",
         LATE, only("ds_empty = make_barriers(DS_STAGES, 2)", "ds_empty = make_barriers(DS_STAGES, 1)")),
        ("dS announced before it is stored", "Earlier values in memory count in dq.", HALVES,
         only(f"{STORE_DS}\n{FENCE}\n{TELL_DS}", f"{TELL_DS}\n{STORE_DS}\n{FENCE}")),
        ("dS of another slot given back", "Room is free whose dS is still to be read.", CAUSAL,
         only(GIVE_DS, GIVE_DS.replace("last", "ds"))),
        ("divided: weights given back before they are read",
         "Weights may be overwritten while they are read.",
         WIDE, only("p = shared.p_tiles.index(p_state.stage).load(S_LAYOUT).to(gl.float32)\n"
                    "mbarrier.arrive(shared.p_empty.index(p_state.stage))",
                    "mbarrier.arrive(shared.p_empty.index(p_state.stage))\n"
                    "p = shared.p_tiles.index(p_state.stage).load(S_LAYOUT).to(gl.float32)")),
        ("dv overwritten before it is stored",
         "Gradients of keys are put where those of values are being copied from.", CAUSAL,
         only("low_dk = (dk * scale).to(DTYPE)\ntma.store_wait(0)",
              "low_dk = (dk * scale).to(DTYPE)")),
        ("phases never flip", "A barrier counts as complete from its second round on.", FULL,
         only("gl.where(wraps, self.phase ^ 1, self.phase)", "self.phase")),
        ("consumers a phase ahead for dout", "The first dout counts as arrived from the start.", CAUSAL,
         only(STATE.format("do_state", 0), STATE.format("do_state", 1), BEFORE_STEPS)),
        ("consumers a phase ahead for queries",
         "A block's queries count as arrived when the block before has.",
         CAUSAL, only(STATE.format("q_state", 0), STATE.format("q_state", 1), BEFORE_STEPS)),
    ), racy=True)  # fmt: skip


def endless() -> tuple[Mutant, ...]:
    """What waits for something that does not come."""
    return mutants_of((
        ("queries of a block that does not come",
         "Behind its last block a program waits for another.", CAUSAL,
         only(WAIT_Q, "mbarrier.wait(shared.q_full.index(q_state.stage), q_state.phase)")),
        ("queries never given back",
         "A program's blocks run out of room.", CAUSAL, only(GIVE_Q, "pass", STEPS)),
        ("dS never given back", "Groups run out of room for gradients of scores.", CAUSAL,
         only(GIVE_DS, "pass", CONSUMER)),
        ("more bytes awaited than come", "The barrier of a tile of dout expects bytes that are not copied.",
         CAUSAL, only("mbarrier.expect(shared.do_full.index(do_state.stage), QUERY_BYTES)",
                      "mbarrier.expect(shared.do_full.index(do_state.stage), QUERY_BYTES + 16)")),
        ("slots never advance", "Every tile is looked for in the first slot.", CAUSAL,
         only("gl.where(wraps, 0, self.stage + 1)", "gl.where(wraps, 0, self.stage)")),
        ("phases flip one slot early", "The last slot of a ring is waited for with the next round's phase.",
         CAUSAL,
         only("gl.where(wraps, self.phase ^ 1, self.phase)", "gl.where(wraps, self.phase, self.phase ^ 1)")),
        ("producer waits for slots that are free", "The producer takes empty slots for full ones.", CAUSAL,
         only(STATE.format("q_state", 1), STATE.format("q_state", 0), PRODUCER)),
        ("divided: weights in the slot of gradients", "Groups count slots of weights and of dS alike.", WIDE,
         only("ds_state = p_state.next(DS_STAGES)", "ds_state = p_state")),
        ("divided: steps of groups differ", "One group takes a step less than the other.", WIDE,
         only("for step in range(steps):", "for step in range(steps - GROUP):", CONSUMER)),
    ), hangs=True)  # fmt: skip
