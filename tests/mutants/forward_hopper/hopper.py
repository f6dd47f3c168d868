"""Kernels of the Hopper family for mutants, and the parts of their text."""

from typing import Any

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.forward_hopper.space import HopperConfig
from tests.mutants.core import Part, Subject
from tests.problems.hopper import FAMILY, a_config

BLOCKS = " in range(n_last - 1, n_block_min - 1, -1):"
PRODUCER = Part("def produce(", "def consume(")
CONSUMER = Part("def consume(", "def forward_hopper(")
FIRST_BLOCK = Part("# The first block has its own code", BLOCKS)
LATER_BLOCKS = Part(BLOCKS, "q_state = q.release(q_state")
END_OF_TILE = Part("# The next tile is located", "def forward_hopper(")
STORE = Part("def store_output(", "def produce(")
LAST_PRODUCT = Part("q_state = q.release(q_state", "# The next tile is located")


def a_small_problem(head_dim: int = 128, causal: Causal = Causal.NONE, **changes: Any) -> Problem:
    """Fewer tiles than an H200 has multiprocessors: no program gets a second one at this shape."""
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=head_dim,
        value_head_dim=head_dim,
        heads=8,
        kv_heads=2,
        batch=1,
        seqlen_q=512,
        seqlen_kv=512,
        causal=causal,
    )
    return msgspec.structs.replace(problem, **changes)


def subject(problem: Problem, *, lse: bool = False, **fields: Any) -> Subject:
    """The family's default config with changes."""
    config: HopperConfig = a_config(problem, **fields)
    return Subject(FAMILY.name, problem, config, Specialization(lse=lse))


_CAUSAL, _FULL = a_small_problem(causal=Causal.BOTTOM_RIGHT), a_small_problem()
CAUSAL = subject(_CAUSAL, defer_pv_wait=False, conditional_rescale=True)
CAUSAL_LSE = subject(_CAUSAL, lse=True)
FULL = subject(_FULL, defer_pv_wait=False, conditional_rescale=True)
# Every rescaling is done at once, and no group waits for its turn.
EAGER = subject(_FULL, defer_pv_wait=False, conditional_rescale=False, ping_pong=False)
# As little in flight as there can be.
SHORT_RINGS = subject(_CAUSAL, q_stages=1, num_stages=2, defer_pv_wait=False, ping_pong=False)
