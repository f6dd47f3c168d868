"""Tests of the baselines of `flashtune bench`: arguments, refusals and installation."""

from collections.abc import Callable

import pytest
import torch

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype
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
    "changes", [{}, {"causal": Causal.NONE}, {"causal": Causal.TOP_LEFT}, {"kv_heads": 4, "seqlen_kv": 70}]
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
