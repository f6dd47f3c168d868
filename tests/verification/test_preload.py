"""Tests of the preload: it calls the operations of a self-check without launches."""

from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, Direction, Problem
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check, comparison
from flashtune.verification.cases import Case, Level
from flashtune.verification.check import preload
from flashtune.verification.inputs import prepared
from flashtune.verification.passes import planned_cases
from flashtune.verification.reference import scores
from tests.verification.launches import launch_by

CPU = torch.device("cpu")
H200 = find_target("h200")
SPECIALIZATION = Specialization(lse=True)
PROBLEM = testing.problem(
    "heads=4,kv_heads=2,seqlen_q=500,seqlen_kv=600,head_dim=32,dtype=bf16,causal,batch=2"
)
PROBLEMS = {
    "plain": PROBLEM,
    "window and bias": msgspec.structs.replace(
        PROBLEM, causal=Causal.NONE, window_left=100, bias=Bias.ADDITIVE
    ),
    "gradients": msgspec.structs.replace(PROBLEM, direction=Direction.BACKWARD),
    "gradients, packed": msgspec.structs.replace(
        PROBLEM, direction=Direction.BACKWARD, packed=900, dropout=True
    ),
}


class Operations(TorchDispatchMode):
    """Notes which of torch's operations are called on which types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [argument for argument in (*args, out) if isinstance(argument, torch.Tensor)]
        if tensors:
            self.met.add((str(func), tensors[0].dtype))
        return out


def never() -> bool:
    return False


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do nothing, and heads worked out as many at a time as on a GPU."""
    monkeypatch.setattr(check, "compile_binary", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    launch_by(monkeypatch, comparison.no_launch)
    monkeypatch.setitem(scores.CHUNK_SCORES, "cpu", scores.CHUNK_SCORES["cuda"])
    monkeypatch.setitem(scores.CHUNK_KEYS, "cpu", scores.CHUNK_KEYS["cuda"])


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_preload_covers_every_torch_operation_of_a_check(problem: Problem) -> None:
    family = find_family("backward_split" if problem.is_backward else "forward_masked")
    config = family.default(problem, H200)
    # Problems of a check have as many queries and keys as a few tiles.
    small = {name: 32 for name in config.__struct_fields__ if "block_" in name}
    config = msgspec.structs.replace(config, **small)
    kernel = render(family, problem, config, SPECIALIZATION)
    with Operations() as preloaded:
        preload(kernel, problem, config, H200, CPU, never)
    with Operations() as checked:
        verdict = check.check_rendered(kernel, problem, config, H200, CPU, Level.QUICK, seed=3)
    assert not verdict.passed, "nothing was written"
    assert len(checked.met) > 50
    assert checked.met <= preloaded.met


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("most", [0, 2, 100])
def test_preload_runs_one_case_of_each_probe_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    family = find_family("forward_masked")
    config = family.default(PROBLEM, H200)
    kernel = render(family, PROBLEM, config, SPECIALIZATION)
    met: list[Case] = []
    prepare = prepared.prepare

    def noted(case: Case, *rest: Any) -> Any:
        met.append(case)
        return prepare(case, *rest)

    monkeypatch.setattr(prepared, "prepare", noted)
    preload(kernel, PROBLEM, config, H200, CPU, lambda: len(met) >= most)
    probes = [case.probe for case, _ in planned_cases(kernel, PROBLEM, config, Level.QUICK, 0)]
    assert [case.probe for case in met] == list(dict.fromkeys(probes))[:most]
