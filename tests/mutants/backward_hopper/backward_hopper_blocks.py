"""Mutants of Hopper backward kernels with block masks, and of the prologue that lists their steps."""

from flashtune.core.problem import Causal
from tests.mutants.backward_hopper.backward_hopper import (
    CONSUMER,
    PRODUCER,
    backward_problem,
    backward_subject,
)
from tests.mutants.core import Mutant, Part, mutants_of

BLOCKS = backward_subject(backward_problem(128, block_mask=128))
CAUSAL_BLOCKS = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, block_mask=128))
SMALL_BLOCKS = backward_subject(backward_problem(128, block_mask=64))
# Blocks of queries have two blocks of the mask.
HALF_BLOCKS = backward_subject(backward_problem(64, block_mask=64), block_m=128, num_stages=2, do_stages=2)
WIDE_BLOCKS = backward_subject(backward_problem(256, Causal.BOTTOM_RIGHT, block_mask=64))
LISTING = Part("def list_steps(", "def prepare(")
STEPS = "gl.maximum(gl.load(listed), 1), m_max"


def blocks() -> tuple[Mutant, ...]:
    """Those of the kernel itself."""
    parts = "gl.where(queries < 64, entry & 1, entry & 4)"
    return (
        *mutants_of(BLOCKS, (
            ("blocks: steps of the next keys",
             "self.blocks + n_block", "self.blocks + (n_block + 1) % self.blocks"),
            ("blocks: first step left out", "return listed + 1,", "return listed + 2,"),
            ("blocks: last step left out", STEPS, STEPS.replace("gl.load(listed)", "gl.load(listed) - 1")),
            ("blocks: queries of the first head",
             "scheduler.group_size + number // m_max", "scheduler.group_size", PRODUCER),
            ("blocks: queries of one step", "entry = next_entry", "pass", CONSUMER),
            ("blocks: dq of the first step",
             "first_address + (entry >>", "first_address + (gl.load(listed) >>", CONSUMER),
            ("blocks: first queries for keys that none sees", "entry & PARTS == 0", "entry & PARTS == -1"),
        )),
        *mutants_of(CAUSAL_BLOCKS, (
            ("blocks: diagonal unmasked", "if entry & (IS_CUT << GROUP) != 0:", "if entry < 0:"),
            ("blocks: diagonal of the first group", "(IS_CUT << GROUP)", "IS_CUT"),
            ("blocks: diagonal of the first head", "(entry >> FLAG_BITS) % m_max", "(entry >> FLAG_BITS)"),
        )),
        *mutants_of(SMALL_BLOCKS, (
            ("blocks: dq of both groups' keys",
             "for turn in gl.static_range(1):", "for turn in gl.static_range(2):"),
        )),
        *mutants_of(HALF_BLOCKS, (
            ("blocks: hidden half unmasked", "if entry & 5 != 5:", "if entry < 0:"),
            ("blocks: other half hidden", parts, "gl.where(queries < 64, entry & 4, entry & 1)"),
        )),
        *mutants_of(WIDE_BLOCKS, (
            ("blocks: divided: sums of one head",
             "first_place + (entry >> FLAG_BITS)", "first_place + (entry >> FLAG_BITS) % m_max"),
        )),
        *mutants_of(SMALL_BLOCKS, (
            ("blocks: steps of the first group",
             "n_block * 2 + GROUP, batch", "n_block * 2, batch", CONSUMER),
        ), hangs=True),
    )  # fmt: skip


def listings() -> tuple[Mutant, ...]:
    """Those of the prologue."""
    return (
        *mutants_of(BLOCKS, (
            ("step listing: lists of the first head",
             "group_size + member", "group_size + member * 0", LISTING),
            ("step listing: lists of the first queries", " + query_block * stride_indices_q", ""),
            ("step listing: keys a block late",
             "key_block = n_start // 128", "key_block = n_start // 128 + 1"),
            ("step listing: search a block too far", "other=0) < key_block", "other=0) <= key_block"),
            ("step listing: a step less", "tl.maximum(count, 1)", "tl.maximum(count - 1, 1)"),
            ("step listing: keys that none sees have no step",
             "tl.store(listed + 1, 0, mask=count == 0)", "pass"),
        )),
        *mutants_of(CAUSAL_BLOCKS, (
            ("step listing: diagonal of the last key",
             "group_start + 63 - diagonal", "group_start - diagonal", None, 2),
            ("step listing: first block skipped", "(m_block >= m_min)", "(m_block > m_min)"),
        )),
        *mutants_of(HALF_BLOCKS, (
            ("step listing: second half for the first",
             "query_block = m_block * 2 + 0", "query_block = m_block * 2 + 1"),
        )),
    )  # fmt: skip
