"""What the model of times is made of, where a slip would only shift the order of trials."""

from __future__ import annotations

import pytest

from flashtune.problem import Dtype, Problem
from flashtune.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.predict import BANDWIDTH_SHARE, memory_seconds


def test_what_the_cache_holds_is_moved_once() -> None:
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=128,
        heads=32,
        kv_heads=8,
        batch=1,
        seqlen_q=4096,
        seqlen_kv=4096,
    )
    family, target = find_family("forward_q_outer"), find_target("h200")
    seconds = memory_seconds(problem, family, family.default(problem, target), target)
    # A head's keys and values fit an H200's L2, so every query tile but the first finds them there.
    least = problem.minimal_bytes() / (target.hbm_bandwidth * 1e9 * BANDWIDTH_SHARE)
    assert seconds == pytest.approx(least)
