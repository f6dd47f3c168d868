"""Mutants of MLA Hopper kernels with wrong waits, releases or phases."""

from __future__ import annotations

from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import only
from tests.mutants.latent_decode.latent import (
    FIRST_BLOCK,
    FULL,
    LATER_BLOCKS,
    PARTS,
    PRODUCER,
    SECOND_GROUP,
    WHOLE,
)

WAIT_LEFT = "mbarrier.wait(left.full.index(k_stage), k_phase)"
WAIT_RIGHT = "mbarrier.wait(right.full.index(k_stage), k_phase)"
WAIT_REST = "mbarrier.wait(rest.full.index(0), step & 1)"
WAIT_WEIGHTS = "mbarrier.wait(exchange.full.index(slot), step >> 1 & 1)"
GIVE_LEFT, GIVE_REST = "mbarrier.arrive(left.empty.index(v_stage))", "mbarrier.arrive(rest.empty.index(0))"
GIVE_RIGHT, GIVE_WEIGHTS = (f"mbarrier.arrive({name}.empty.index({slot}))"
                            for name, slot in (("right", "stage"), ("exchange", "slot")))  # fmt: skip
TELL_WEIGHTS, FENCE = "mbarrier.arrive(exchange.full.index(slot))", "fence_async_shared()"
STORE_FACTORS = "exchange.factors.index(slot).store(rescale)"
STORE_WEIGHTS = "exchange.tiles.index(slot).store(gl.convert_layout(weights, SCORES))"
DONE = "accumulator = warpgroup_mma_wait(0, deps=[accumulator])"


def waits() -> tuple[Mutant, ...]:
    """A tile is used before it has arrived."""
    return mutants_of((
        ("queries not waited for", "A program's first scores may be of queries that have not arrived.", WHOLE,
         only("mbarrier.wait(queries.full.index(0), 0)", "pass")),
        ("first keys not waited for",
         "A program's first scores are of whatever lies where its keys will be.", WHOLE,
         only(WAIT_LEFT, "pass", FIRST_BLOCK)),
        ("left halves and rests not waited for",
         "Scores of all blocks but the first may be of keys that have not arrived.", WHOLE,
         (Patch(WAIT_LEFT, "pass", LATER_BLOCKS), Patch(WAIT_REST, "pass"))),
        ("right halves not waited for",
         "Scores of all blocks but the first may be of keys that have not arrived.",
         WHOLE, only(WAIT_RIGHT, "pass", LATER_BLOCKS)),
        ("rests not waited for",
         "Scores of all blocks but the first may be of keys that have not arrived.", WHOLE,
         only(WAIT_REST, "pass")),
        ("weights not waited for", "The second group takes weights that the first has not stored yet.", WHOLE,
         only(WAIT_WEIGHTS, "pass")),
        ("no fence behind weights",
         "The second group may multiply values before they are in shared memory.", FULL,
         only(f"{STORE_FACTORS}\n{FENCE}", STORE_FACTORS, times=2)),
        ("no fence before the output leaves", "The copy engine may read an output before it is there.", WHOLE,
         only(f"{FENCE}\ncopy_out(out", "copy_out(out", times=2)),
        ("half a tile counts as a whole", "The barrier of a left half expects half of its bytes.", WHOLE,
         only("expect(left.full.index(stage), 32768)", "expect(left.full.index(stage), 16384)")),
        ("a page counts as a block", "Blocks of pages count as arrived with the first of them.", PARTS,
         only("expect(right.full.index(stage), 32768)", "expect(right.full.index(stage), 8192)")),
    ), racy=True)  # fmt: skip


def releases() -> tuple[Mutant, ...]:
    """Room is given back too early, or counted wrongly."""
    values_done = "accumulator, weights = warpgroup_mma_wait(2, deps=[accumulator, weights])"
    scores_done = "scores = warpgroup_mma_wait(0, deps=[scores])"
    stored = f"{STORE_WEIGHTS}\n{STORE_FACTORS}\n{FENCE}\n"
    return mutants_of((
        ("left halves given back before they are read",
         "Values may be overwritten while weights meet them.", WHOLE,
         only(f"{values_done}\n{GIVE_LEFT}", f"{GIVE_LEFT}\n{values_done}")),
        ("rests given back before they are read",
         "Keys may be overwritten while scores are made of them.", WHOLE,
         only(f"{scores_done}\n{GIVE_REST}", f"{GIVE_REST}\n{scores_done}", LATER_BLOCKS)),
        ("rests given back twice", "Keys may be overwritten as soon as they have arrived.", WHOLE,
         only(WAIT_REST, f"{WAIT_REST}\n{GIVE_REST}")),
        ("right halves given back before they are read", "Values may be overwritten while weights meet them.",
         WHOLE, only(f"{DONE}\n{GIVE_RIGHT}", f"{GIVE_RIGHT}\n{DONE}")),
        ("weights announced before they are stored", "The second group takes earlier values.", FULL,
         only(f"{stored}{TELL_WEIGHTS}", f"{TELL_WEIGHTS}\n{stored.rstrip()}", times=2)),
        ("phases never flip", "A barrier counts as complete from its second round on.", WHOLE,
         only("gl.where(wraps, phase ^ 1, phase)", "phase")),
        ("first group a phase ahead", "The first keys count as arrived from the start.", WHOLE,
         only("k_stage, k_phase, v_stage = 0, 0, 0", "k_stage, k_phase, v_stage = 0, 1, 0")),
        ("phases of weights of every step", "Slots of weights flip twice as often as they do.", WHOLE,
         only(WAIT_WEIGHTS, WAIT_WEIGHTS.replace("step >> 1 & 1", "step & 1"))),
        ("one phase of rests", "The rest of every second block is not waited for.", WHOLE,
         only(WAIT_REST, WAIT_REST.replace("step & 1", "0"))),
    ), racy=True)  # fmt: skip


def endless() -> tuple[Mutant, ...]:
    """What waits for something that does not come."""
    return mutants_of((
        ("an empty part has no block", "A part without a block waits for keys that are not copied.", PARTS,
         only("end = gl.where(is_empty, 1, end)", "pass")),
        ("left halves never given back", "Keys run out of room.", WHOLE, only(GIVE_LEFT, "pass")),
        ("rests never given back", "Keys run out of room.", WHOLE, only(GIVE_REST, "pass", LATER_BLOCKS)),
        ("right halves never given back",
         "Keys run out of room.", WHOLE, only(GIVE_RIGHT, "pass", SECOND_GROUP)),
        ("weights never given back", "Weights run out of room.", WHOLE, only(GIVE_WEIGHTS, "pass")),
        ("sums never announced", "The second group never stops waiting.", WHOLE,
         only("mbarrier.arrive(exchange.finished.index(0))", "pass")),
        ("more bytes awaited than come", "The barrier of a rest expects bytes that are not copied.", WHOLE,
         only("mbarrier.expect(rest.full.index(0), 8192)", "mbarrier.expect(rest.full.index(0), 8208)")),
        ("phases flip one slot early",
         "The last slot of a ring is waited for with the next round's phase.", WHOLE,
         only("gl.where(wraps, phase ^ 1, phase)", "gl.where(wraps, phase, phase ^ 1)")),
        ("slots never advance", "Every tile is looked for in the first slot.", WHOLE,
         only("gl.where(wraps, 0, stage + 1)", "gl.where(wraps, 0, stage)")),
        ("producer waits for slots that are free", "The producer takes empty slots for full ones.", WHOLE,
         only("stage, phase = 0, 1", "stage, phase = 0, 0", PRODUCER)),
    ), hangs=True)  # fmt: skip
