"""Kernels of the split backward family for mutants, and the parts of their text."""

from typing import NamedTuple

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, Direction, Dtype, Problem
from flashtune.templates.registry import find_family
from tests.mutants.core import Part, Subject

FAMILY = "backward_split"
# The kernels of a rendered file: delta, then dk and dv, then dq.
DELTA = Part("def delta(", "def backward_split(")
KEYS = Part("def backward_split(", "def gradient_of_queries(")
QUERIES = Part("def gradient_of_queries(", "def prologue_plan(")
# Blocks that no mask touches have a loop of their own.
LOOPS = 2
DIAGONAL = "diagonal = seqlen_kv - seqlen_q"
ROW_END = "row_end = key_stop(positions, seqlen_kv)"
HIDE = "p = tl.where(visible, p, 0.0)"
LOW_WEIGHTS, LOW_SCORES = (
    f"{name}_low = {tensor}.to(q.dtype.element_ty)" for name, tensor in (("p", "p"), ("ds", "ds"))
)
KEYS_DELTA, QUERIES_DELTA = "(dp - row_delta[None, :])", "(dp - row_delta[:, None])"
SCALE = "scale_log2 = scale * LOG2_E"
ROWS = "row_base = (sequence * heads + head)"


class Size(NamedTuple):
    """Type of the inputs, tiles, and how many queries and keys there are."""

    dtype: Dtype
    block_m: int
    block_n: int
    seqlen: int

    def subject(
        self,
        causal: Causal = Causal.BOTTOM_RIGHT,
        *,
        lse: bool = False,
        exact: bool = False,
        bias: Bias = Bias.NONE,
    ) -> Subject:
        """A kernel with head dims that are no power of two, in float32 where it must be `exact`."""
        problem = Problem(
            dtype=Dtype.FP32 if exact else self.dtype,
            head_dim=24,
            value_head_dim=20,
            heads=4,
            kv_heads=2,
            batch=2,
            seqlen_q=self.seqlen,
            seqlen_kv=self.seqlen,
            causal=causal,
            bias=bias,
            direction=Direction.BACKWARD,
        )
        m, n = self.block_m, self.block_n
        tiles = {"block_m": m, "block_n": n, "dq_block_m": n, "dq_block_n": m}
        pipelines = {"num_warps": 4, "num_stages": 2, "dq_warps": 4, "dq_stages": 2}
        config = msgspec.convert({**tiles, **pipelines}, find_family(FAMILY).config_type)
        return Subject(FAMILY, problem, config, Specialization(lse=lse))


# Under the interpreter 16-bit products are garbage.
INTERPRETED = Size(Dtype.FP32, 16, 32, 64)
USUAL = Size(Dtype.BF16, 32, 64, 512)
