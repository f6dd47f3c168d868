"""Mutants of MLA Hopper kernels with wrong waits, releases or phases."""

from tests.mutants.core import Mutant, Patch, mutants_of
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
    return (
        *mutants_of(WHOLE, (
            ("queries not waited for", "mbarrier.wait(queries.full.index(0), 0)", "pass"),
            ("first keys not waited for", WAIT_LEFT, "pass", FIRST_BLOCK),
            ("left halves and rests not waited for",
             (Patch(WAIT_LEFT, "pass", LATER_BLOCKS),
              Patch(WAIT_REST, "pass"))),
            ("right halves not waited for", WAIT_RIGHT, "pass", LATER_BLOCKS),
            ("rests not waited for", WAIT_REST, "pass"),
            ("weights not waited for", WAIT_WEIGHTS, "pass"),
            ("no fence before the output leaves", f"{FENCE}\ncopy_out(out", "copy_out(out", None, 2),
            ("half a tile counts as a whole",
             "expect(left.full.index(stage), 32768)", "expect(left.full.index(stage), 16384)"),
        ), racy=True),
        *mutants_of(FULL, (
            ("no fence behind weights", f"{STORE_FACTORS}\n{FENCE}", STORE_FACTORS, None, 2),
        ), racy=True),
        *mutants_of(PARTS, (
            # Blocks of pages count as arrived with the first of them.
            ("a page counts as a block",
             "expect(right.full.index(stage), 32768)", "expect(right.full.index(stage), 8192)"),
        ), racy=True),
    )  # fmt: skip


def releases() -> tuple[Mutant, ...]:
    """Room is given back too early, or counted wrongly."""
    values_done = "accumulator, weights = warpgroup_mma_wait(2, deps=[accumulator, weights])"
    scores_done = "scores = warpgroup_mma_wait(0, deps=[scores])"
    stored = f"{STORE_WEIGHTS}\n{STORE_FACTORS}\n{FENCE}\n"
    return (
        *mutants_of(WHOLE, (
            ("left halves given back before they are read",
             f"{values_done}\n{GIVE_LEFT}", f"{GIVE_LEFT}\n{values_done}"),
            ("rests given back before they are read",
             f"{scores_done}\n{GIVE_REST}", f"{GIVE_REST}\n{scores_done}", LATER_BLOCKS),
            ("rests given back twice", WAIT_REST, f"{WAIT_REST}\n{GIVE_REST}"),
            ("right halves given back before they are read",
             f"{DONE}\n{GIVE_RIGHT}", f"{GIVE_RIGHT}\n{DONE}"),
            # A barrier counts as complete from its second round on.
            ("phases never flip", "gl.where(wraps, phase ^ 1, phase)", "phase"),
            ("first group a phase ahead",
             "k_stage, k_phase, v_stage = 0, 0, 0", "k_stage, k_phase, v_stage = 0, 1, 0"),
            ("phases of weights of every step",
             WAIT_WEIGHTS, WAIT_WEIGHTS.replace("step >> 1 & 1", "step & 1")),
            ("one phase of rests", WAIT_REST, WAIT_REST.replace("step & 1", "0")),
        ), racy=True),
        *mutants_of(FULL, (
            ("weights announced before they are stored",
             f"{stored}{TELL_WEIGHTS}", f"{TELL_WEIGHTS}\n{stored.rstrip()}", None, 2),
        ), racy=True),
    )  # fmt: skip


def endless() -> tuple[Mutant, ...]:
    """Mutants that wait for an arrival that does not come."""
    return (
        *mutants_of(PARTS, (
            # A part without a block waits for keys that are not copied.
            ("an empty part has no block", "end = gl.where(is_empty, 1, end)", "pass"),
        ), hangs=True),
        *mutants_of(WHOLE, (
            ("left halves never given back", GIVE_LEFT, "pass"),
            ("rests never given back", GIVE_REST, "pass", LATER_BLOCKS),
            ("right halves never given back", GIVE_RIGHT, "pass", SECOND_GROUP),
            ("weights never given back", GIVE_WEIGHTS, "pass"),
            ("sums never announced", "mbarrier.arrive(exchange.finished.index(0))", "pass"),
            ("more bytes awaited than come",
             "mbarrier.expect(rest.full.index(0), 8192)", "mbarrier.expect(rest.full.index(0), 8208)"),
            # The last slot of a ring is waited for with the next round's phase.
            ("phases flip one slot early",
             "gl.where(wraps, phase ^ 1, phase)", "gl.where(wraps, phase, phase ^ 1)"),
            ("slots never advance", "gl.where(wraps, 0, stage + 1)", "gl.where(wraps, 0, stage)"),
            ("producer waits for slots that are free",
             "stage, phase = 0, 1", "stage, phase = 0, 0", PRODUCER),
        ), hangs=True),
    )  # fmt: skip
