"""Tests of `flashtune bench` under the interpreter: its calls compute the problems that are asked for."""

import msgspec
import pytest
from torch import Tensor

from flashtune.core.problem import Direction, Dtype, Problem
from flashtune.tuner.bench.admission import Admitted, admit
from flashtune.tuner.bench.backward import gradient_binders, gradient_judge
from flashtune.tuner.bench.bench import require_work
from flashtune.tuner.bench.calls import bind_program, program_call, selected
from flashtune.tuner.bench.judging import output_judge
from flashtune.tuner.execution.inputs import make_tensors
from tests.tuner.bench.bench_problems import CPU, FEATURES, a_problem


def a_small_problem(name: str) -> Problem:
    problem = a_problem(**FEATURES[name], dtype=Dtype.FP32)
    queries = min(problem.seqlen_q, 70)
    return msgspec.structs.replace(problem, heads=2, kv_heads=1, seqlen_q=queries, seqlen_kv=70)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", FEATURES)
def test_prepared_and_usual_calls_compute_the_problem(name: str) -> None:
    problem = a_small_problem(name)
    require_work(problem)
    tensors = make_tensors(problem, CPU)
    call = program_call(problem, tensors)
    family, detail = selected(call)
    assert detail.startswith(family)
    bound = bind_program(call, detail)
    judge = output_judge(problem, tensors)
    assert judge(bound.run()) <= 1
    out = bound.call()
    assert isinstance(out, Tensor)
    assert judge(call.heads_first(out)) <= 1


@pytest.mark.parametrize("name", ["window", "softcap", "additive bias", "sinks", "packed with features"])
def test_gradients_of_calls_are_those_of_the_problem(name: str) -> None:
    problem = msgspec.structs.replace(a_small_problem(name), direction=Direction.BACKWARD)
    require_work(problem)
    tensors = make_tensors(problem, CPU)
    judge = gradient_judge(problem, tensors)
    (entry,) = admit(gradient_binders(problem, tensors, "a kernel", ()), judge, lambda run: run)
    assert isinstance(entry, Admitted), entry
    assert 0 < entry.error <= 1
