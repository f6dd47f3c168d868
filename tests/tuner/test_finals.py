"""Which peers take part in the finals; their times need a GPU (see search/test_gpu.py)."""

from __future__ import annotations

import pytest
import torch

from flashtune.problem import Dtype, Problem
from flashtune.standard import score_bytes
from flashtune.tuner import finals

PROBLEM = Problem(
    dtype=Dtype.FP32, head_dim=16, value_head_dim=16, heads=2, kv_heads=2, batch=1, seqlen_q=64, seqlen_kv=64
)


@pytest.mark.parametrize(("scores", "takes_part"), [(8, True), (4, False)])
def test_the_standard_computation_takes_part_where_its_scores_fit_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, scores: int, takes_part: bool
) -> None:
    free = scores * score_bytes(PROBLEM)
    monkeypatch.setattr(finals, "BACKENDS", {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = finals.make_tensors(PROBLEM, torch.device("cpu"))
    names = [name for name, _ in finals.peer_runs(PROBLEM, tensors)]
    assert names == (["standard"] if takes_part else [])
