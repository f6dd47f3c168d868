"""Kernels of the MLA Hopper family for mutants, and the parts of their text."""

from typing import Any

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.decode_latent_hopper.space import LatentConfig
from tests.mutants.core import Part, Subject

FAMILY = "decode_latent_hopper"
PRODUCER = Part("def produce(", "def weigh(")
FIRST_BLOCK = Part("# The first block stands alone", "for step in range(1, end - begin):")
LATER_BLOCKS = Part("for step in range(1, end - begin):", "row_sum = ")
SECOND_GROUP = Part("def consume(", f"def {FAMILY}(")
PLAN = Part("def launch_plan(", "def attention(")
PLAN_OF_PARTS = Part("def epilogue_plan(", "def attention(")


def _subject(num_splits: int = 1, num_stages: int = 2, overlap_pv: bool = True, **changes: Any) -> Subject:
    """Fewer programs than an H200 has multiprocessors; all queries of the problem fill one tile."""
    problem = msgspec.structs.replace(
        Problem(
            dtype=Dtype.BF16,
            head_dim=576,
            value_head_dim=512,
            heads=64,
            kv_heads=1,
            batch=2,
            seqlen_q=1,
            seqlen_kv=512,
            causal=Causal.BOTTOM_RIGHT,
            mla=True,
        ),
        **changes,
    )
    config = LatentConfig(
        num_warps=4,
        num_stages=num_stages,
        queries=problem.seqlen_q,
        num_splits=num_splits,
        overlap_pv=overlap_pv,
    )
    return Subject(FAMILY, problem, config, Specialization(lse=True))


WHOLE = _subject(seqlen_q=4)
FULL = _subject(causal=Causal.NONE, overlap_pv=False)
HALF_PRECISION = _subject(dtype=Dtype.FP16)
NARROW = _subject(head_dim=144, value_head_dim=128, num_stages=4)
LENGTHS = _subject(kv_lengths=True)
PARTS = _subject(page_size=64, num_splits=3)
SMALL_PAGES = _subject(page_size=16)
LARGE_PAGES = _subject(page_size=128, overlap_pv=False)
