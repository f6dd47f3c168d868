"""A problem for `flashtune bench` that is small enough for the CPU."""

from __future__ import annotations

import torch

from flashtune.core.problem import Causal, Dtype, Problem

CPU = torch.device("cpu")


def a_problem(**changes: object) -> Problem:
    values: dict[str, object] = {
        "dtype": Dtype.BF16,
        "head_dim": 16,
        "value_head_dim": 16,
        "heads": 4,
        "kv_heads": 2,
        "batch": 2,
        "seqlen_q": 70,
        "seqlen_kv": 90,
        "causal": Causal.BOTTOM_RIGHT,
    }
    return Problem(**(values | changes))  # type: ignore[arg-type]
