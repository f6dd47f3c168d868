"""Tests of the baselines of `flashtune bench`: arguments, refusals and installation."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.dispatch.masked_sdpa import masked_attention
from flashtune.runtime.unfused import unfused_attention
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
from flashtune.tuner.execution.sdpa import BACKENDS, sdpa_call
from flashtune.tuner.execution.timed_runs import standard_run
from tests.problems.plain_masks import plain_attention
from tests.tuner.bench.bench_problems import CPU, a_problem


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


@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("causal", list(Causal))
def test_sdpa_and_unfused_attention_support_masks(bias: Bias, causal: Causal) -> None:
    problem = a_problem(dtype=Dtype.FP32, bias=bias, causal=causal)
    tensors = make_tensors(problem, CPU)
    out, _ = plain_attention(problem, tensors.q, tensors.k, tensors.v, tensors.side, tensors.scale)
    attend = sdpa_call(problem, tensors)
    assert attend is not None
    assert isinstance(attend, functools.partial)
    assert attend.func is masked_attention, "what dispatch serves is timed"
    torch.testing.assert_close(attend().double(), out, rtol=1e-4, atol=1e-5)
    result = standard_run(problem, tensors)()
    assert isinstance(result, tuple)
    torch.testing.assert_close(result[0].double(), out, rtol=1e-4, atol=1e-5)
    for name in BACKENDS:
        assert bind_peer(name, problem, tensors).name == name


def fake_flash_attn_4(problem: Problem, *, swapped: bool) -> Callable[..., tuple[Tensor, None]]:
    """flash-attn-4's interface over the standard computation; wrong where its heads are swapped."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, None]:
        assert causal == (problem.causal is not Causal.NONE)
        heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, _ = unfused_attention(problem, *heads_first, scale=softmax_scale)
        return (out.flip(1) if swapped else out).transpose(1, 2), None

    return attend


@pytest.mark.parametrize("swapped", [False, True])
def test_flash_attn_4_is_called_in_its_own_layout_and_verified(
    monkeypatch: pytest.MonkeyPatch, swapped: bool
) -> None:
    class FakeModule:
        flash_attn_func = staticmethod(fake_flash_attn_4(a_problem(), swapped=swapped))

    monkeypatch.setattr("importlib.import_module", lambda name: FakeModule)
    problem = a_problem()
    tensors = make_tensors(problem, CPU)
    judge = output_judge(problem, tensors)
    bound = bind_peer(FLASH_ATTN_4, problem, tensors)
    assert (judge(bound.run()) <= 1) is not swapped
    called = bound.call()
    assert isinstance(called, tuple)
    assert called[0].shape == (2, 70, 4, 16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (FLASH_ATTN_4, {"causal": Causal.TOP_LEFT}),
        (FLASH_ATTN_4, {"dtype": Dtype.FP32}),
    ],
)
def test_baselines_refuse_unsupported_problems(name: str, changes: dict[str, object]) -> None:
    problem = a_problem(**changes)
    with pytest.raises(RefusalError):
        bind_peer(name, problem, make_tensors(problem, CPU))


class Compiled:
    """Records how FlexAttention is compiled, and runs it eagerly."""

    def __init__(self) -> None:
        self.resets = 0
        self.options: list[dict[str, object]] = []

    def compile(self, function: Callable[..., object], **options: object) -> Callable[..., object]:
        self.options.append(options)
        return function

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": Causal.NONE}, {"causal": Causal.TOP_LEFT}, {"kv_heads": 4, "seqlen_kv": 70}],
)
def test_flex_attention_is_correct_and_compiled_once_per_shape(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    compiled = Compiled()
    monkeypatch.setattr(torch, "compile", compiled.compile)
    monkeypatch.setattr(torch.compiler, "reset", compiled.reset)
    problem = a_problem(**changes)
    tensors = make_tensors(problem, CPU)
    judge = output_judge(problem, tensors)
    assert judge(bind_peer(FLEX, problem, tensors).run()) <= 1
    assert compiled.options[0] == {"dynamic": False, "fullgraph": True}
    assert compiled.resets == 1


@pytest.mark.parametrize("name", PEERS)
def test_baselines_do_not_support_quantised_inputs(name: str) -> None:
    problem = a_problem(dtype=Dtype.E4M3)
    with pytest.raises(RefusalError, match="e4m3"):
        bind_peer(name, problem, make_tensors(problem, CPU))


def test_baseline_that_is_not_installed_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_runs, "version_of", lambda _: "")
    assert not {FLASH_ATTN_4, FLASHINFER} & {*installed_peers()}
    assert check_peers((FLEX, CUDNN, FLEX)) == (FLEX, CUDNN)
    with pytest.raises(UsageError, match="pip install flash-attn-4"):
        check_peers((FLASH_ATTN_4,))
    with pytest.raises(UsageError, match="pip install flashinfer-python"):
        check_peers((FLASHINFER,))
    monkeypatch.setattr(peer_runs, "version_of", lambda _: "4.0.0")
    assert installed_peers() == PEERS


def test_command_lists_the_baselines() -> None:
    assert NAMED_PEERS == PEERS
