"""Tests of the checks of backward launches: results, repeated launches and stray writes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Bias, Causal, Dtype
from flashtune.launch.tensors import BackwardTensors
from flashtune.verification import comparison
from flashtune.verification.cases import Case
from flashtune.verification.gradients.comparison import backward_pass
from flashtune.verification.gradients.inputs import prepare
from flashtune.verification.gradients.tolerance import beyond_order
from flashtune.verification.inputs.guarded_tensors import bits_of
from flashtune.verification.inputs.prepared import ROWS_AFTER
from flashtune.verification.lengths import Lengths
from flashtune.verification.probes import Probe
from tests.verification.gradients.checking import CPU, H200, a_kernel, a_problem, failures
from tests.verification.gradients.plain_kernel import differentiate
from tests.verification.launches import launch_by

Spoil = Callable[[int, BackwardTensors, Callable[..., Tensor]], object]
OTHERWISE = "elements of {} farther from an earlier launch's than another order of sums"


def a_case(*, deterministic: bool = False) -> Case:
    problem = a_problem(seqlen_q=9, seqlen_kv=20, deterministic=deterministic)
    return Case(problem=problem, probe=Probe.RANDOM, block=16, scale=0.25, repeats=3)


def found(monkeypatch: pytest.MonkeyPatch, case: Case, spoil: Spoil) -> set[str]:
    """The errors of correct gradients after `spoil` changed them, launch by launch."""
    prepared = prepare(case, Alignment.SIXTEEN, CPU, 1, False)
    launches = 0

    def launch(tensors: BackwardTensors, scale: float, side: ExtraInputs, allocate: Any) -> None:
        nonlocal launches
        differentiate(case.problem, tensors, scale, side)
        spoil(launches, tensors, allocate)
        launches += 1

    launch_by(monkeypatch, launch)
    kernel = a_kernel(False)
    pass_ = backward_pass(kernel, case, prepared)
    wrong = failures(list(comparison.launch_findings(kernel, None, case, pass_, H200, 0)))
    assert launches == case.repeats
    return {message.partition(": ")[2].rpartition(" ")[0] for message in wrong}


def outside(tensor: Tensor) -> Tensor:
    """The element before a tensor's first one."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() - 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_correct_launches_pass(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    assert found(monkeypatch, a_case(deterministic=deterministic), lambda *_: None) == set()


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_only_deterministic_kernels_must_be_bitwise_equal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == 2:
            row = getattr(tensors, name)[0, 1, 3]
            # The next larger magnitude.
            bits_of(row)[row.abs().argmax()] += 1

    assert found(monkeypatch, a_case(), spoil) == set()
    unlike = f"elements of {name} unlike an earlier launch's"
    assert found(monkeypatch, a_case(deterministic=True), spoil) == {unlike}


def test_signed_zeros_differ_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        # A key behind the last query: no query sees it.
        tensors.dk[0, 1, 15] = -0.0 if number == 2 else 0.0

    def a_causal_case(*, deterministic: bool) -> Case:
        case = a_case(deterministic=deterministic)
        return replace(case, problem=replace(case.problem, causal=Causal.TOP_LEFT))

    assert found(monkeypatch, a_causal_case(deterministic=False), spoil) == set()
    unlike = "elements of dk unlike an earlier launch's"
    assert found(monkeypatch, a_causal_case(deterministic=True), spoil) == {unlike}


@pytest.mark.parametrize(("name", "launch"), [("dq", 0), ("dk", 1), ("dv", 2)])
def test_each_launch_must_be_correct(monkeypatch: pytest.MonkeyPatch, name: str, launch: int) -> None:
    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == launch:
            getattr(tensors, name)[0, 1, 3] *= 1.1

    assert found(monkeypatch, a_case(), spoil) == {f"row errors of {name}", OTHERWISE.format(name)}


@pytest.mark.parametrize(("name", "launch"), [("dq", 2), ("dk", 0), ("dv", 1)])
def test_each_launch_must_match_the_first(monkeypatch: pytest.MonkeyPatch, name: str, launch: int) -> None:
    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == launch:
            # A row may be off by more than this, but an element is not moved so far by an order.
            row = getattr(tensors, name)[0, 1, 3]
            row[row.abs().argmin()] += 2.0**-7 * row.abs().max()

    assert found(monkeypatch, a_case(), spoil) == {OTHERWISE.format(name)}


@pytest.mark.parametrize("launch", [0, 1])
def test_nan_does_not_match_the_first_launch(monkeypatch: pytest.MonkeyPatch, launch: int) -> None:
    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == launch:
            tensors.dk[0, 1, 3] = math.nan

    assert OTHERWISE.format("dk") in found(monkeypatch, a_case(), spoil)


def test_float32_launches_are_not_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case()
    case = replace(case, problem=replace(case.problem, dtype=Dtype.FP32))

    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == 2:
            tensors.dk[0, 1, 3] *= 1 + 2.0**-12

    assert found(monkeypatch, case, lambda *_: None) == set()
    assert found(monkeypatch, case, spoil) == {"row errors of dk"}


def test_gradients_of_biases_are_compared_with_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case()
    case = replace(case, problem=replace(case.problem, bias=Bias.ADDITIVE, alibi=True))

    def spoil(number: int, tensors: BackwardTensors, _: object) -> None:
        if number == 2:
            assert tensors.dbias is not None
            # Some rows are hidden.
            row = tensors.dbias.flatten(0, 2)[tensors.dbias.flatten(0, 2).abs().amax(-1).argmax()]
            row[row.abs().argmax()] *= 1.1

    assert found(monkeypatch, case, lambda *_: None) == set()
    assert found(monkeypatch, case, spoil) == {"row errors of dbias", OTHERWISE.format("dbias")}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda _, tensors, __: outside(tensors.dq).fill_(1.0), "writes around dq"),
        (lambda _, tensors, __: outside(tensors.dv).fill_(1.0), "writes around dv"),
        (lambda _, __, allocate: outside(allocate((4,), CPU)).fill_(1.0), "writes around a workspace"),
        (lambda _, tensors, __: outside(tensors.dout).fill_(1.0), "inputs overwritten"),
        (lambda _, tensors, __: tensors.lse[0, 0].add_(0.0).fill_(2.0), "inputs overwritten"),
    ],
    ids=["before dq", "before dv", "before a workspace", "before dout", "lse"],
)
def test_writes_to_other_buffers_are_reported(
    monkeypatch: pytest.MonkeyPatch, spoil: Spoil, expected: str
) -> None:
    def last(number: int, tensors: BackwardTensors, allocate: Callable[..., Tensor]) -> None:
        if number == 2:
            spoil(number, tensors, allocate)

    assert found(monkeypatch, a_case(), last) == {expected}


def test_packed_keys_outside_of_sequences_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem(packed=9, batch=2, seqlen_q=5, seqlen_kv=1)
    case = Case(
        problem=problem, probe=Probe.RANDOM, block=16, scale=0.25, lengths=Lengths((4, 5), (0, 0)), repeats=3
    )
    assert found(monkeypatch, case, lambda *_: None) == set()


def test_packed_rows_after_the_last_sequence_must_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem(packed=9, batch=2, seqlen_q=5, seqlen_kv=5)
    case = Case(
        problem=problem, probe=Probe.RANDOM, block=16, scale=0.25, lengths=Lengths((4, 5), (3, 5)), repeats=3
    )

    def spoil(_: int, tensors: BackwardTensors, __: object) -> None:
        for tensor in (tensors.q, tensors.dout, tensors.lse, tensors.dq):
            assert tensor.shape[2] == 9 + ROWS_AFTER
        tensors.dq[0, 0, 9, 0] = 0.0

    assert found(monkeypatch, case, lambda *_: None) == set()
    assert found(monkeypatch, case, spoil) == {"writes around dq"}


TYPES = (torch.bfloat16, torch.float16)
ALLOWED = 1.0


def beyond(first: Tensor, later: Tensor, allowed: float = 0.0) -> float:
    room = torch.full(first.shape[:-1], allowed, dtype=torch.float64)
    return beyond_order(first, later, room, first.dtype).item()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [0.0, 0.7, 1.0, -1.0, 2.0, 300.0, 2.0**-14, 2.0**-24])
def test_adjacent_float_is_within_any_tolerance(dtype: torch.dtype, value: float) -> None:
    row = torch.tensor([[value, 0.0]], dtype=dtype)
    assert beyond(row, row) <= 0
    for step in (-1, 1):
        extra_inputs = row.clone()
        bits_of(extra_inputs)[0, 0] += step
        if extra_inputs[0, 0].isfinite():
            assert beyond(row, extra_inputs) <= 0
            assert beyond(extra_inputs, row) <= 0
    extra_inputs = row.clone()
    bits_of(extra_inputs)[0, 0] += 3
    assert beyond(row, extra_inputs) > 0


@pytest.mark.parametrize("dtype", TYPES)
def test_launches_may_differ_by_a_fraction_of_the_tolerance(dtype: torch.dtype) -> None:
    row = torch.zeros(1, 2, dtype=dtype)
    moved = row.clone()
    moved[0, 1] = ALLOWED / 128
    assert beyond(row, moved, ALLOWED) <= 0
    moved[0, 1] = ALLOWED / 32
    assert beyond(row, moved, ALLOWED) > 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_is_not_within_tolerance(wrong: float) -> None:
    row = torch.zeros(1, 2, dtype=torch.bfloat16)
    spoilt = torch.full_like(row, wrong)
    assert not beyond(row, spoilt, ALLOWED) <= 0
    assert not beyond(spoilt, row, ALLOWED) <= 0
    assert not beyond(spoilt, spoilt, ALLOWED) <= 0
