"""Tests that batch-invariant calls get kernels of one order of arithmetic, and that others raise."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import flashtune
from flashtune.core.errors import KernelError, ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import find_target
from flashtune.dispatch.lookup import default_selection
from flashtune.templates.family import unsupported_reason
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, H200, a_config, a_problem, sampled_configs
from tests.support.machine import Machine

WIDTHS = (24, 64, 96, 128, 192, 232, 248, 256)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"packed": 4096},
    {"page_size": 16, "window_left": 100},
    {"kv_lengths": True, "softcap": True, "sinks": True},
    {"seqlen_q": 1, "seqlen_kv": 32768, "page_size": 64},
    {"seqlen_q": 5, "seqlen_kv": 8192, "alibi": True},
    {"chunk": 512, "causal": Causal.BOTTOM_RIGHT},
    {"window_left": 100, "causal": Causal.BOTTOM_RIGHT, "kv_heads": 2},
)


@pytest.fixture
def all_invariant() -> Iterator[None]:
    flashtune.set_batch_invariant(True)
    yield
    flashtune.set_batch_invariant(False)


def bound(width: int, **features: Any) -> Problem:
    return a_problem(width, batch_invariant=True, **features)


@pytest.mark.parametrize("width", WIDTHS)
def test_all_configs_of_a_key_have_one_order(width: int) -> None:
    order = FAMILY.numeric_order(bound(width))
    for features in FEATURES:
        problem = bound(width, **features)
        default = FAMILY.default(problem, H200)
        for config in (default, *sampled_configs(problem, 5)):
            assert FAMILY.numeric_order(problem, config) == order
        assert FAMILY.space(problem, H200).admits(default)
        assert default_selection(problem, H200, Specialization()).record.config == default


def test_configs_of_another_order_are_refused() -> None:
    problem = bound(128, causal=Causal.BOTTOM_RIGHT)
    for changes in ({"block_n": 64}, {"conditional_rescale": False}):
        config = a_config(problem, **changes)
        reason = unsupported_reason(FAMILY, problem, H200, Specialization(), config)
        assert reason is not None
        assert "another order of arithmetic" in reason
        plain = msgspec.structs.replace(problem, batch_invariant=False)
        assert unsupported_reason(FAMILY, plain, H200, Specialization(), config) is None


def test_defaults_of_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(bound(128), block_n=64)
    monkeypatch.setattr(type(FAMILY), "default", lambda *_: config)
    with pytest.raises(ProblemError, match="leave out batch_invariant"):
        default_selection(bound(128), H200, Specialization())


def splits_of(problem: Problem) -> int:
    config = FAMILY.default(problem, H200)
    assert isinstance(config, HopperConfig)
    return config.num_splits


def test_a_few_queries_split_long_keys() -> None:
    for queries, keys, splits in ((1, 8192, 2), (1, 1000, 1), (4096, 4096, 1)):
        problem = a_problem(
            128, heads=32, kv_heads=8, batch=1, seqlen_q=queries, seqlen_kv=keys, batch_invariant=True
        )
        assert splits_of(problem) == splits
    window = bound(128, seqlen_q=1, seqlen_kv=8192, window_left=4095)
    assert splits_of(window) == 1
    split = a_config(window, num_splits=2, split_epilogue=False)
    with pytest.raises(KernelError, match="keys of windows"):
        render(FAMILY, window, split, Specialization())


def test_one_kernel_splits_keys_of_all_lengths() -> None:
    short, long = (bound(128, batch=1, seqlen_q=1, seqlen_kv=keys) for keys in (8192, 2**20))
    config = FAMILY.default(short, H200)
    assert FAMILY.default(long, H200) == config
    sources = [render(FAMILY, problem, config, Specialization()).source for problem in (short, long)]
    assert sources[0] == sources[1]
    many = msgspec.structs.replace(long, batch=64)
    assert not FAMILY.space(many, H200).contains(config)


def a_call(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 16, 64, dtype=dtype) for _ in range(3)]


@pytest.mark.usefixtures("machine")
def test_explanations_show_the_order() -> None:
    text = str(flashtune.explain(*a_call(), batch_invariant=True))
    assert "invariant on nvidia-h200: generated" in text
    assert "order of arithmetic: split_keys=2048, block_n=128" in text


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.bfloat16, {"dropout_p": 0.5}),
        (torch.bfloat16, {"attn_mask": torch.ones(1, 1, 16, 16, dtype=torch.bool)}),
    ],
)
@pytest.mark.usefixtures("machine")
def test_other_calls_raise(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with pytest.raises(ProblemError):
        flashtune.attention(*a_call(dtype), batch_invariant=True, **options)


def test_other_gpus_raise() -> None:
    with pytest.raises(ProblemError, match=r"forward_hopper runs on sm_90 alone.*leave out batch_invariant"):
        default_selection(bound(128), find_target("nvidia-a100"), Specialization())


def test_a_setting_of_the_process_holds_for_known_calls(machine: Machine) -> None:
    tensors = a_call()
    flashtune.attention(*tensors)
    kernels = len(machine.kernels)
    flashtune.set_batch_invariant(True)
    try:
        flashtune.attention(*tensors)
        assert len(machine.kernels) == kernels + 1
        assert flashtune.explain(*tensors).problem.batch_invariant
        assert not flashtune.explain(*tensors, batch_invariant=False).problem.batch_invariant
    finally:
        flashtune.set_batch_invariant(False)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.usefixtures("machine", "all_invariant")
def test_plans_keep_their_setting(flag: bool) -> None:
    lengths = torch.tensor([16], dtype=torch.int32)
    flashtune.set_batch_invariant(flag)
    plan = flashtune.plan(*a_call(), kv_lengths=lengths)
    flashtune.set_batch_invariant(not flag)
    assert plan(*a_call(), kv_lengths=lengths).shape == (1, 2, 16, 64)


@pytest.mark.usefixtures("all_invariant")
def test_a_shared_prefix_raises() -> None:
    q, pages = torch.randn(2, 1, 2, 64), torch.randn(4, 16, 2, 64)
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.full((2,), 20, dtype=torch.int32)
    with pytest.raises(ProblemError, match="leave out shared_prefix"):
        flashtune.attention_paged(q, pages, pages, table, lengths, shared_prefix=16)
