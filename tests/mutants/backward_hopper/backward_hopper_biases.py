"""Mutants of Hopper backward kernels with an additive bias, and of the prologue's work for it."""

from flashtune.core.problem import Bias, Causal
from tests.mutants.backward_hopper.backward_hopper import (
    CONSUMER,
    PREPARE,
    PRODUCER,
    STEPS,
    backward_problem,
    backward_subject,
)
from tests.mutants.core import Mutant, Part, mutants_of

CAUSAL = backward_subject(backward_problem(64, Causal.BOTTOM_RIGHT, bias=Bias.ADDITIVE))
WIDE = backward_subject(backward_problem(128, bias=Bias.ADDITIVE))
LARGE = Part("def is_large(", "def prepare(")
ADDED = "s * scale + bias_tile.load(S_LAYOUT).to(gl.float32)"
STORED = "[batch, head, m_block * BLOCK_M, n_start]"
SOURCE = "n_start], shared.ds_tiles.index(GROUP * DS_STAGES + ds_state.stage)"
PLACE = "row, (n_block * 2 + group) * ROWS]"


def biases() -> tuple[Mutant, ...]:
    """Those of the kernel itself."""
    return (
        *mutants_of(CAUSAL, (
            ("bias left out", ADDED, "s * scale", STEPS),
            ("bias: scaled as scores", ADDED, ADDED.replace("s * scale + ", "scale * (s + ") + ")", STEPS),
            ("bias of the first head", "gl.minimum(head, bias_heads - 1)", "0", PRODUCER),
            ("bias of the first queries", PLACE, PLACE.replace("row", "0"), PRODUCER),
            ("bias: sums of large scores left out", "s + shared.sum_rows.index(GROUP).load(S_LAYOUT)", "s"),
            ("bias gradients of the first head", STORED, STORED.replace("head", "0"), STEPS),
            ("bias gradients at the first queries", STORED, STORED.replace("m_block", "0"), STEPS),
            ("bias gradients at the next keys", STORED, STORED.replace("n_start", "n_start + 1"), STEPS),
            ("bias gradients of another slot",
             SOURCE, SOURCE.replace("ds_state.stage", "(ds_state.stage ^ 1)"), STEPS),
        )),
        *mutants_of(WIDE, (
            ("bias of the first group's keys", PLACE, "row, n_block * 2 * ROWS]", PRODUCER),
            ("bias gradients of the first group", SOURCE, SOURCE.replace("GROUP", "0"), STEPS),
            ("bias gradients: head stays",
             "head = gl.where(wraps, head + 1, head)", "head = gl.where(wraps, head, head)", STEPS),
        )),
    )  # fmt: skip


def bias_steps() -> tuple[Mutant, ...]:
    """Those of the prologue, of sequences, and of waits."""
    return (
        *mutants_of(CAUSAL, (
            ("bias of the first sequence", "gl.minimum(batch, bias_batches - 1)", "0", PRODUCER),
            ("bias gradients of skipped blocks not cleared",
             "& (keys < seqlen_kv)[None, :])", "& (keys < 0)[None, :])", PREPARE),
            ("bias: large scores summed as others", "> 1024.0", "> 1e38", LARGE),
            ("bias: hidden keys among large scores", "(queries + diagonal)", "(queries + seqlen_kv)", LARGE),
            ("bias: large scores without it", " + bias_tile.to(tl.float32), float", ", float", LARGE),
            ("bias: sums of large scores of the first queries",
             "stat_step + queries", "stat_step + queries - part", LARGE),
        )),
        *mutants_of(CAUSAL, (
            ("bias gradients overwritten before their copy", "tma.store_wait(DS_STAGES - 1)", "pass", STEPS),
            ("bias read before it arrives", "mbarrier.wait(shared.bias_full.index(GROUP), step & 1)", "pass",
             CONSUMER),
        ), racy=True),
        *mutants_of(CAUSAL, (
            ("bias never given back", "mbarrier.arrive(shared.bias_empty.index(GROUP))", "pass", CONSUMER),
        ), hangs=True),
    )  # fmt: skip
