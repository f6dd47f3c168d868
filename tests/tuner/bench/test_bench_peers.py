"""Tests of the baselines of flashtune bench: arguments, refusals, and FlashInfer with a fake on the CPU."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype
from flashtune.request.call import dense_call
from flashtune.tuner.bench import peer_runs
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4
from flashtune.tuner.bench.flashinfer import FLASHINFER
from flashtune.tuner.bench.judging import output_judge
from flashtune.tuner.bench.peer_runs import (
    CUDNN,
    FLEX,
    PEERS,
    UNFUSED,
    RefusalError,
    bind_peer,
    check_peers,
    installed_peers,
)
from flashtune.tuner.cli.commands.bench import PEERS as NAMED_PEERS
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.sdpa import BACKENDS
from tests.problems.features import expected
from tests.tuner.bench.bench_problems import CACHES, CPU, PACKED, PAGES, VARLEN, a_problem


@pytest.mark.parametrize(
    ("name", "changes", "refused"),
    [
        *((name, {"window_left": 8, "softcap": True}, "softcap") for name in BACKENDS),
        (FLASH_ATTN_4, {"window_left": 8, "alibi": True, "prefix": True}, "alibi, prefix"),
        (FLEX, {"page_size": 16, "softcap": True}, "pages"),
        (UNFUSED, {"packed": 110, "softcap": True}, "packed"),
    ],
)
def test_baselines_refuse_unsupported_features(name: str, changes: dict[str, object], refused: str) -> None:
    with pytest.raises(RefusalError, match=f"^it is not timed with {refused}$"):
        bind_peer(name, a_problem(**changes), make_tensors(a_problem(), CPU))


@pytest.mark.parametrize("name", PEERS)
def test_baselines_do_not_support_quantised_inputs(name: str) -> None:
    problem = a_problem(dtype=Dtype.E4M3)
    with pytest.raises(RefusalError, match="e4m3"):
        bind_peer(name, problem, make_tensors(problem, CPU))


def test_baseline_that_is_not_installed_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version = ""
    monkeypatch.setattr(peer_runs, "version_of", lambda _: version)
    assert not {FLASH_ATTN_4, FLASHINFER} & {*installed_peers()}
    assert check_peers((FLEX, CUDNN, FLEX)) == (FLEX, CUDNN)
    with pytest.raises(UsageError, match="pip install flash-attn-4"):
        check_peers((FLASH_ATTN_4,))
    with pytest.raises(UsageError, match="pip install flashinfer-python"):
        check_peers((FLASHINFER,))
    version = "4.0.0"
    assert installed_peers() == PEERS


def test_command_lists_the_baselines() -> None:
    assert NAMED_PEERS == PEERS


class FakeWrapper:
    """The interface of FlashInfer's wrappers over unfused attention of each sequence."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype is torch.uint8
        assert layout == "NHD"
        self.is_decode = use_tensor_cores

    def plan(self, *arguments: Any, causal: bool = False, **options: Any) -> None:
        self.causal, self.options = causal, options
        *self.starts, heads, kv_heads, width = arguments[: len(arguments) - self.paged]
        self.shape, self.size = (heads, kv_heads, width), arguments[-1]

    paged = 1

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        starts, pages, last = self.starts[-3:]
        queries = torch.arange(len(q) + 1) if self.is_decode else self.starts[0]
        made = []
        for number, (first, end) in enumerate(pairwise(queries.tolist())):
            own = pages[starts[number] : starts[number + 1]].long()
            count = (len(own) - 1) * self.size + int(last[number])
            k, v = (part[own].flatten(0, 1)[:count] for part in cache)
            made.append(self.attend(q[first:end], k, v))
        return out.copy_(torch.cat(made))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.shape
        assert self.options.get("head_dim_vo", q.shape[2]) == v.shape[2]
        assert (q.dtype, k.dtype) == (self.options["q_data_type"], self.options["kv_data_type"])
        left = self.options["window_left"]
        call = dense_call(
            q[None],
            k[None],
            v[None],
            layout="bshd",
            causal="bottom_right" if self.causal else "none",
            window=(None if left < 0 else left, None),
            softcap=self.options["logits_soft_cap"],
        )
        assert self.options["sm_scale"] == q.shape[2] ** -0.5
        return expected(call)[0][0].to(q.dtype)


class FakeRaggedWrapper(FakeWrapper):
    """The interface of FlashInfer's wrapper of packed sequences."""

    paged = 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Tensor:  # type: ignore[override]
        bounds = (list(pairwise(starts.tolist())) for starts in self.starts)
        parts = zip(*bounds, strict=True)
        return out.copy_(torch.cat([self.attend(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in parts]))


class FakeFlashInfer:
    """The classes that the benchmark uses."""

    BatchDecodeWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    BatchPrefillWithRaggedKVCacheWrapper = FakeRaggedWrapper


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        PACKED,
        PACKED | {"window_left": 20, "softcap": True},
        PACKED | {"causal": Causal.NONE},
        PAGES,
        PAGES | {"window_left": 20},
        PAGES | PACKED,
        PAGES | PACKED | {"softcap": True},
        PACKED | {"head_dim": 32, "value_head_dim": 16},
        PAGES | PACKED | {"head_dim": 32, "value_head_dim": 16},
        PAGES | {"seqlen_q": 1},
        PAGES | {"seqlen_q": 1, "window_left": 20, "softcap": True},
    ],
)
def test_flashinfer_computes_packed_sequences_and_pages(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = a_problem(**changes)
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer)
    tensors = make_tensors(problem, CPU)
    bound = bind_peer(FLASHINFER, problem, tensors)
    assert bound.detail.startswith("flashinfer ")
    out = bound.run()
    assert isinstance(out, Tensor)
    judge = output_judge(problem, tensors)
    assert judge(out) <= 1
    assert not judge(out.flip(1)) <= 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "packed sequences and pages"),
        (VARLEN["packed from the top"], "bottom-right"),
        (VARLEN["packed with features"], "alibi"),
        (PACKED | {"window_left": 9, "window_right": 3, "causal": Causal.NONE}, "bound on the right"),
        (CACHES["e4m3 pages"], "not timed with"),
        (PAGES | {"seqlen_q": 90, "causal": Causal.TOP_LEFT}, "bottom-right"),
        (PAGES | {"seqlen_q": 1, "head_dim": 32, "value_head_dim": 16}, "as wide as the keys"),
    ],
)
def test_flashinfer_refuses_other_problems(changes: dict[str, Any], reason: str) -> None:
    problem = a_problem(**changes)
    with pytest.raises(RefusalError, match=reason):
        bind_peer(FLASHINFER, problem, make_tensors(problem, CPU))
