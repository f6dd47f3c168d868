"""Which peers take part in the finals; their times need a GPU (see search/test_gpu.py)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from flashtune.kernel import Specialization
from flashtune.problem import Dtype, Problem
from flashtune.standard import score_bytes
from flashtune.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner import finals
from flashtune.tuner.candidates import Candidate

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


def test_quantized_problems_come_with_scales_and_without_peers() -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3, heads=4)
    tensors = finals.make_tensors(problem, torch.device("cpu"))
    assert tensors.q.dtype == tensors.k.dtype == tensors.v.dtype == torch.float8_e4m3fn
    assert tensors.out.dtype is torch.bfloat16
    q_scale, k_scale, v_scale = tensors.scales.scales
    assert q_scale is not None
    assert k_scale is not None
    assert v_scale is not None
    assert (q_scale.shape, k_scale.shape, v_scale.shape) == ((1, 4), (1, 2), (1, 2))
    assert list(finals.peer_runs(problem, tensors)) == []
    wide = tensors.q.float() * q_scale[..., None, None]
    assert abs(float(wide.std()) - 1) < 0.1


def test_launches_of_the_finals_are_given_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3)
    tensors = finals.make_tensors(problem, torch.device("cpu"))
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(finals, "render", lambda *_: None)
    monkeypatch.setattr(finals, "bind", lambda *_: lambda *values: given.append(values))
    family = find_family("forward_q_outer")
    target = find_target("h200")
    candidate = Candidate(family.name, family.default(PROBLEM, target))
    finals.kernel_run(problem, candidate, Specialization(), target, tensors)()
    assert given[0][0] is tensors.q
    assert given[0][-1] is tensors.scales
