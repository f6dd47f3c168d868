"""Tests of the baselines of `flashtune bench`: arguments, refusals and installation."""

import pytest

from flashtune.core.errors import UsageError
from flashtune.core.problem import Dtype
from flashtune.tuner.bench import peer_runs
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4
from flashtune.tuner.bench.flashinfer import FLASHINFER
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
