"""Which peers take part in the finals; their times need a GPU (see search/test_gpu.py)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from flashtune.features import Bias, KvDtype, KvScale
from flashtune.kernel import Specialization
from flashtune.problem import Causal, Dtype, Problem
from flashtune.standard import score_bytes
from flashtune.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner import finals
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.tensors import make_tensors
from tests.plain_masks import plain_attention

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
    tensors = make_tensors(PROBLEM, torch.device("cpu"))
    names = [name for name, _ in finals.peer_runs(PROBLEM, tensors)]
    assert names == (["standard"] if takes_part else [])


def test_quantized_problems_come_with_scales_and_without_peers() -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3, heads=4)
    tensors = make_tensors(problem, torch.device("cpu"))
    assert tensors.q.dtype == tensors.k.dtype == tensors.v.dtype == torch.float8_e4m3fn
    assert tensors.out.dtype is torch.bfloat16
    q_scale, k_scale, v_scale = tensors.side.scales
    assert q_scale is not None
    assert k_scale is not None
    assert v_scale is not None
    assert (q_scale.shape, k_scale.shape, v_scale.shape) == ((1, 4), (1, 2), (1, 2))
    assert list(finals.peer_runs(problem, tensors)) == []
    wide = tensors.q.float() * q_scale[..., None, None]
    assert abs(float(wide.std()) - 1) < 0.1


def test_launches_of_the_finals_are_given_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = msgspec.structs.replace(PROBLEM, dtype=Dtype.E4M3)
    tensors = make_tensors(problem, torch.device("cpu"))
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(finals, "render", lambda *_: None)
    monkeypatch.setattr(finals, "bind", lambda *_: lambda *values: given.append(values))
    family = find_family("forward_q_outer")
    target = find_target("h200")
    candidate = Candidate(family.name, family.default(PROBLEM, target))
    finals.kernel_run(problem, candidate, Specialization(), target, tensors)()
    assert given[0][0] is tensors.q
    assert given[0][-1] is tensors.side


FEATURES: dict[str, dict[str, object]] = {
    "window": {"window_left": 9},
    "window and first tokens": {
        "window_left": 9,
        "window_right": 4,
        "first_tokens": 2,
        "causal": Causal.NONE,
    },
    "chunk": {"chunk": 16},
    "prefix": {"prefix": True},
    "lengths": {"lengths": True, "causal": Causal.NONE},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN, "causal": Causal.NONE},
    "boolean and alibi": {"bias": Bias.BOOLEAN, "alibi": True},
    "softcap": {"softcap": True},
    "sinks": {"sinks": True},
    "packed": {"packed": 150},
    "pages": {"page_size": 16},
    "packed pages": {"page_size": 32, "packed": 150},
    "scaled": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "scaled pages": {"page_size": 16, "kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE},
    "latent": {"page_size": 64, "latent": True, "head_dim": 24, "kv_heads": 1, "seqlen_q": 1},
}
NOT_BY_SDPA = ("softcap", "sinks", "packed", "pages", "packed pages", "scaled", "scaled pages", "latent")


def featured(name: str) -> Problem:
    fields = {"kv_heads": 2, "heads": 4, "batch": 3, "causal": Causal.BOTTOM_RIGHT, **FEATURES[name]}
    return msgspec.structs.replace(PROBLEM, **fields)


@pytest.mark.parametrize("name", FEATURES)
def test_tensors_with_features_are_what_kernels_and_peers_take(name: str) -> None:
    problem = featured(name)
    tensors = make_tensors(problem, torch.device("cpu"))
    out, _ = plain_attention(problem, tensors.q, tensors.k, tensors.v, tensors.side, tensors.scale)
    assert out.shape == tensors.out.shape
    assert out.isfinite().all(), "a row of no sequence, or a key that is no number"
    call = finals.sdpa_call(problem, tensors)
    assert (call is None) == (name in NOT_BY_SDPA)
    if call is not None:
        torch.testing.assert_close(call().nan_to_num(0.0).double(), out, rtol=1e-4, atol=1e-5)
    if not problem.features & finals.LAID_OUT:
        standard = finals._standard_run(problem, tensors)()
        assert isinstance(standard, tuple)
        torch.testing.assert_close(standard[0].double(), out, rtol=1e-4, atol=1e-5)


def test_packed_tensors_have_the_tokens_that_the_problem_names() -> None:
    problem = featured("packed")
    one, other = (make_tensors(problem, torch.device("cpu")) for _ in range(2))
    assert one.q.shape[2] == 150
    assert one.side.cu_seqlens_q is not None
    assert other.side.cu_seqlens_q is not None
    assert one.side.cu_seqlens_q.tolist() == other.side.cu_seqlens_q.tolist()
    assert one.side.cu_seqlens_q.diff().max() == problem.seqlen_q


def test_pages_are_shuffled_and_the_same_in_every_run() -> None:
    problem = featured("pages")
    one, other = (make_tensors(problem, torch.device("cpu")).side.block_table for _ in range(2))
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)
    assert (one[0].diff() != 1).any()
