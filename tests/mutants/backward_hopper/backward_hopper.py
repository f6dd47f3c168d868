"""Kernels of the Hopper backward family for mutants, and the parts of their text."""

from typing import Any

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from tests.mutants.core import Part, Subject

FAMILY = "backward_hopper"
PRODUCER = Part("def produce(", "def issue_dq(")
DQ = Part("def issue_dq(", "def consume(")
CONSUMER = Part("def consume(", f"def {FAMILY}(")
BEFORE_STEPS = Part("def consume(", "for step in range(steps):\n        q_tile")
STEPS = Part("for step in range(steps):\n        q_tile", "# This group's v is not needed")
KEEPER = Part("def order_additions(", "def issue_dq(")
PREPARE = Part("def prepare(", "def finish(")
FINISH = Part("def finish(", "def descriptors(")
FIRST_PLAN = Part("def prologue_plan(", "def launch_plan(")
PLAN = Part("def launch_plan(", "def epilogue_plan(")
LAST_PLAN = Part("def epilogue_plan(", "def attention_backward(")

PROBABILITIES = "p = gl.exp2(s * scale_log2)"
ROWS_OF_HEAD = "stat = (batch * scheduler.kv_heads * scheduler.group_size + head) * 2"
TAKE_DQ = "dq = issue_dq(GROUP, shared, last_state)"
ADD_DQ = "add_dq(GROUP, shared, last_address, dq"


def backward_problem(head_dim: int, causal: Causal = Causal.NONE, **changes: Any) -> Problem:
    """Fewer programs than an H200 has multiprocessors."""
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=head_dim,
        value_head_dim=head_dim,
        heads=4,
        kv_heads=2,
        batch=2,
        seqlen_q=512,
        seqlen_kv=512,
        causal=causal,
        direction=Direction.BACKWARD,
    )
    return msgspec.structs.replace(problem, **changes)


def backward_subject(problem: Problem, *, dlse: bool = False, **changes: Any) -> Subject:
    """The family's default config with changes."""
    family = find_family(FAMILY)
    config = msgspec.structs.replace(family.default(problem, find_target("h200")), **changes)
    return Subject(FAMILY, problem, config, Specialization(lse=dlse))


_CAUSAL = backward_problem(128, Causal.BOTTOM_RIGHT)
# Groups take turns at dq, as they do by default at up to 128 columns.
CAUSAL = backward_subject(_CAUSAL)
TOP_LEFT = backward_subject(backward_problem(128, Causal.TOP_LEFT, seqlen_kv=300))
FULL = backward_subject(backward_problem(128))
TOLD = backward_subject(_CAUSAL, dlse=True)
# Columns that fill no tile.
PADDED = backward_subject(backward_problem(96, value_head_dim=80))
# Tiles of 64 columns are made transposed, of halves of queries where there are no turns.
NARROW = backward_subject(backward_problem(64))
NARROW_HALVES = backward_subject(backward_problem(64), alternate_dq=False)
# Each group makes half of dq, at once or a step late.
HALVES = backward_subject(
    _CAUSAL, alternate_dq=False, defer_dq=False, early_dv=False, init_accumulators=False, early_dk=False
)
LATE = backward_subject(backward_problem(128), alternate_dq=False)
# Groups divide the products.
WIDE = backward_subject(backward_problem(256, Causal.BOTTOM_RIGHT))
WIDE_FULL = backward_subject(backward_problem(256))
# Sums of dq in the order of blocks of keys.
ORDERED = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, deterministic=True))
ORDERED_FULL = backward_subject(backward_problem(128, deterministic=True))
ORDERED_HALVES = backward_subject(backward_problem(64, deterministic=True), alternate_dq=False)
ORDERED_WIDE = backward_subject(backward_problem(256, deterministic=True))
DROPPING = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, dropout=True))
