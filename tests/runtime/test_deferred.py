"""Tests of calls that another operator serves until their kernels are prepared on the worker thread."""

import gc
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import flashtune
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.problem import Causal, Problem
from flashtune.dispatch.tables import Tables
from flashtune.recording.recorder import read_counts
from flashtune.request.call import Call, dense_call, varlen_call
from flashtune.request.gradients import BackwardInputs
from flashtune.runtime import background
from flashtune.runtime.background import Worker
from flashtune.runtime.buckets import REFUSED
from flashtune.runtime.session import SESSION, Session, record_calls
from tests.runtime.training.training_calls import backward_record
from tests.support.machine import PROBLEM, Machine, expected, inputs, tuned
from tests.support.records import make_record
from tests.support.runtime import using
from tests.support.unfused import unfused
from tests.support.values import present

USUAL = "sdpa-cudnn"
FASTER, SLOWER = {USUAL: 1.5}, {USUAL: 1.005}


def called(problem: Problem, **options: Any) -> Call:
    return dense_call(*inputs(problem), causal=True, **options)


def ready(call: Call, usual: str | None = USUAL, caller: str = "", session: Session = SESSION) -> Any:
    """The executor, or None if the replaced operator serves the call."""
    entry = session.entry(call, usual, caller=caller)
    return None if entry is None or entry.passes is None else entry.passes.executor


def served(call: Call, usual: str | None = USUAL) -> Any:
    """The executor after all preparations."""
    ready(call, usual)
    SESSION.wait()
    return ready(call, usual)


def with_lengths(problem: Problem, seqlen_q: int, seqlen_kv: int, batch: int = 2) -> Problem:
    return msgspec.structs.replace(problem, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, batch=batch)


def test_a_faster_kernel_serves_after_its_preparation(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    call = called(PROBLEM)
    assert ready(call, USUAL) is None
    executor = served(call)
    torch.testing.assert_close(
        executor(*call[:3], None, call.side), expected(call.q, call.k, call.v), atol=0, rtol=0
    )


@pytest.mark.parametrize("peers", [SLOWER, {"sdpa-flash": 9.0}, {}], ids=["slower", "another", "unknown"])
def test_the_replaced_operator_serves_unless_it_is_known_to_be_slower(
    machine: Machine, peers: dict[str, float]
) -> None:
    tuned(machine, make_record(PROBLEM, peers=peers))
    call = called(PROBLEM)
    assert served(call) is None
    kind = present(SESSION.entry(call, USUAL))
    assert kind.is_refused
    assert not machine.kernels


def test_the_worker_loads_the_kernel_that_clears_rows(machine: Machine) -> None:
    threads = []

    def loaded(*_: object) -> None:
        threads.append(threading.current_thread().name)

    machine.tail_clearer = loaded  # type: ignore[method-assign, assignment]
    q, starts = torch.randn(40, 2, 64), torch.tensor([0, 10, 40], dtype=torch.int32)
    ready(varlen_call(q, q, q, starts, starts, 30, 30), None)
    SESSION.wait()
    assert threads == ["flashtune-prepare"]


def test_tensors_with_their_sign_in_a_flag_are_passed_on(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    call = called(PROBLEM)
    assert served(call) is not None
    assert ready(call._replace(k=torch._neg_view(call.k)), USUAL) is None


def test_kernels_serve_where_no_operator_was_measured(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    assert served(called(PROBLEM), None) is not None


def test_new_lengths_of_a_bucket_are_served_at_once(machine: Machine) -> None:
    tuned(machine, make_record(with_lengths(PROBLEM, 512, 512), peers=FASTER))
    assert served(called(with_lengths(PROBLEM, 300, 300))) is not None
    prepared = machine.steps.count("compile")
    for length in range(301, 311):
        call = called(with_lengths(PROBLEM, length, length))
        executor = present(ready(call, USUAL))
        out = executor(*call[:3], None, call.side)
        torch.testing.assert_close(out, expected(call.q, call.k, call.v), atol=0, rtol=0)
    assert machine.steps.count("compile") == prepared
    assert ready(called(with_lengths(PROBLEM, 200, 200)), USUAL) is None


def test_explanations_name_the_caller(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    call = called(PROBLEM)
    assert "called by" not in str(flashtune.explain(*call[:3], causal=True))
    for _ in range(2):
        ready(call, USUAL, "torch")
        SESSION.wait()
    explanation = flashtune.explain(*call[:3], causal=True)
    assert explanation.caller == "torch"
    assert "called by flashtune.integrations.torch" in str(explanation)
    # Later calls of another kind, without a name and with another one.
    for usual, name, caller in ((None, "", "torch"), ("sdpa-flash", "vllm", "vllm")):
        ready(call, usual, name)
        assert flashtune.explain(*call[:3], causal=True).caller == caller


def test_unequal_lengths_are_not_in_the_bucket_of_equal_ones(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    assert served(called(with_lengths(PROBLEM, 512, 512))) is not None
    call = dense_call(*inputs(with_lengths(PROBLEM, 300, 310)), causal="top_left")
    executor = served(call, None)
    out = executor(*call[:3], None, call.side)
    torch.testing.assert_close(out, expected(call.q, call.k, call.v, "top_left"), atol=0, rtol=0)


def test_a_tuned_problem_has_its_own_bucket(machine: Machine) -> None:
    odd = with_lengths(PROBLEM, 300, 300, batch=3)
    tuned(machine, make_record(odd, peers=SLOWER), make_record(PROBLEM, peers=FASTER))
    assert served(called(odd)) is None
    assert served(called(with_lengths(PROBLEM, 301, 301))) is not None


def test_one_thread_prepares_all_buckets(machine: Machine) -> None:
    def count() -> int:
        return [thread.name for thread in threading.enumerate()].count("flashtune-prepare")

    served(called(PROBLEM))
    before = count()
    machine.compiler.release.clear()
    for batch in (1, 2, 4, 8):
        assert ready(called(with_lengths(PROBLEM, 64, 64, batch)), None) is None
    assert count() == before
    assert not SESSION.wait(0.01)
    machine.compiler.release.set()
    assert SESSION.wait(600)
    assert machine.compiler.threads == {"flashtune-prepare"}


def test_a_failed_bucket_is_remembered_with_one_warning(machine: Machine) -> None:
    machine.right = False
    tuned(machine, make_record(PROBLEM, peers=FASTER, kernel="0" * 32))
    call = called(PROBLEM)
    with pytest.warns(FlashtuneWarning, match="the replaced operator serves") as warned:
        assert served(call) is None
    assert len(warned) == 1
    checks = len(machine.checked)
    other = called(with_lengths(PROBLEM, 511, 511))
    assert served(other) is None
    assert served(call) is None
    assert len(machine.checked) <= checks + 1


def test_an_unexpected_error_reaches_no_call(machine: Machine) -> None:
    machine.compiler.failure = AssertionError("a defect")
    with pytest.warns(FlashtuneWarning, match="a defect"):
        assert served(called(PROBLEM), None) is None


class WithoutRecords(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.loads = 0

    def records(self, target_name: str) -> Tables:
        self.loads += 1
        raise OSError("a full disk")


def test_records_that_cannot_be_loaded_refuse_all_calls() -> None:
    broken = WithoutRecords()
    with using(broken, broken, broken.compiler):
        with pytest.warns(FlashtuneWarning, match="a full disk") as warned:
            assert served(called(PROBLEM)) is None
        assert served(called(with_lengths(PROBLEM, 64, 64))) is None
        assert len(warned) == broken.loads == 1
        assert SESSION.entry(called(PROBLEM), USUAL) is REFUSED


def test_a_launch_that_cannot_be_bound_is_refused(machine: Machine) -> None:
    machine.compiles = False
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    with pytest.warns(FlashtuneWarning, match="out of registers"):
        assert served(called(PROBLEM)) is None


def test_a_capture_neither_queues_nor_binds(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    machine.capturing = True
    first, second = called(PROBLEM), called(with_lengths(PROBLEM, 511, 511))
    assert served(first) is None
    assert not SESSION.entries
    machine.capturing = False
    assert served(first) is not None
    machine.capturing = True
    assert ready(first) is not None
    assert ready(second) is None
    machine.capturing = False
    assert ready(second) is not None


def test_a_full_queue_is_not_made_longer(machine: Machine) -> None:
    session = Session(machine, machine, machine.compiler, queue_limit=2)
    ready(called(PROBLEM), session=session)
    session.wait()
    began, release = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        release.wait(60)

    # The first call only loads the records. Two kinds are queued, and the others are new again afterwards.
    for batches, kinds in (((1, 4, 8, 16, 32, 64), 2), ((64,), 3)):
        began.clear()
        release.clear()
        session.worker.put(block, 1)
        assert began.wait(60)
        for batch in batches:
            ready(called(with_lengths(PROBLEM, 8, 8, batch)), None, session=session)
        count = len(session.entries)
        release.set()
        session.wait()
        assert count == kinds


def test_preparations_keep_no_tensors(machine: Machine) -> None:
    served(called(PROBLEM))
    machine.compiler.release.clear()
    call = called(with_lengths(PROBLEM, 64, 64))
    alive = [weakref.ref(tensor) for tensor in call[:3]]
    ready(call, None)
    del call
    gc.collect()
    left = [reference for reference in alive if reference() is not None]
    machine.compiler.release.set()
    assert not left


@pytest.mark.slow
def test_threads_get_the_same_bits(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER))
    call = called(PROBLEM)
    want = expected(call.q, call.k, call.v)
    wrong: list[object] = []
    served_by_kernels: list[object] = []

    def run() -> None:
        for _ in range(5):
            executor = ready(call)
            if executor is not None:
                served_by_kernels.append(executor)
                out = executor(*call[:3], None, call.side)
                if not (isinstance(out, torch.Tensor) and torch.equal(out, want)):
                    wrong.append(executor)
            else:
                SESSION.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served_by_kernels
    assert not wrong
    assert machine.steps.count("compile") == 1


@pytest.mark.parametrize(
    ("first", "last", "serves"),
    [
        pytest.param(1.5, 1.5, True, id="faster"),
        pytest.param(0.9, 1.5, True, id="slower-forward"),
        pytest.param(0.9, 0.9, False, id="slower"),
        pytest.param(1.5, None, False, id="unknown-backward"),
    ],
)
def test_both_passes_are_chosen_together(
    machine: Machine, first: float, last: float | None, serves: bool
) -> None:
    tuned(
        machine,
        make_record(PROBLEM, peers={USUAL: first}),
        backward_record(PROBLEM, peers={} if last is None else {USUAL: last}),
    )
    q, k, v = (tensor.requires_grad_() for tensor in inputs(PROBLEM))
    call = dense_call(q, k, v, causal=True)
    executor = served(call)
    assert (executor is not None) == serves
    if not serves:
        return
    out = executor(q, k, v, None, call.side)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    want, _ = unfused(q, k, v, scale=0.125, causal=Causal.BOTTOM_RIGHT)
    for gradient, other in zip(gradients, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_bias_has_a_gradient_if_it_requires_grad(machine: Machine, is_trained: bool) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER), backward_record(PROBLEM, peers=FASTER))
    q, k, v = (tensor.requires_grad_() for tensor in inputs(PROBLEM))
    bias = torch.zeros(PROBLEM.seqlen_q, PROBLEM.seqlen_kv, dtype=q.dtype)
    call = dense_call(q, k, v, causal=True, attn_bias=bias.requires_grad_(is_trained))
    assert served(call, None) is not None
    kind = present(SESSION.entry(call, None))
    assert kind.has_best_tensors
    (backward,) = (kernel for kernel in machine.kernels if kernel.writes("dq"))
    assert backward.writes("dbias") is is_trained


def test_passes_serve_without_autograd(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, peers=FASTER), backward_record(PROBLEM, peers=FASTER))
    call = called(PROBLEM)
    SESSION.entry(call, USUAL, needs_grad=True)
    SESSION.wait()
    kind = present(SESSION.entry(call, USUAL, needs_grad=True))
    SESSION.wait()
    passes = present(kind.passes)
    out, lse = passes.forward(*call[:3], None, call.side)
    want, want_lse = unfused(*call[:3], scale=0.125, causal=Causal.BOTTOM_RIGHT, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    gradients = present(passes.backward)(
        BackwardInputs(*call[:3], out, lse, torch.ones_like(out), None, None)
    )
    assert gradients.dq.shape == call.q.shape


def test_invalid_calls_are_refused_without_an_error(machine: Machine) -> None:
    q, k, v = inputs(PROBLEM)
    served(called(PROBLEM))
    assert ready(dense_call(q, k[..., :32], v), USUAL) is None
    assert ready(dense_call(q, k, v, scale=-1.0), USUAL) is None
    assert ready(dense_call(q[:, :, :0], k, v), USUAL) is None
    assert ready(dense_call(q, None, v), USUAL) is None  # type: ignore[arg-type]


def test_calls_that_are_passed_on_are_recorded_too(machine: Machine, file: Path) -> None:
    tuned(machine, make_record(PROBLEM, peers=SLOWER))
    call = called(PROBLEM)
    with record_calls(file):
        assert served(call) is None
        calls = 3
        for _ in range(calls):
            ready(call, USUAL)
    (count,) = read_counts(file)
    assert count.problem == PROBLEM
    # The first call came before the records were loaded.
    assert count.calls == calls + 1
    assert not SESSION.entries


def test_a_worker_goes_on_after_an_error(recwarn: Any) -> None:
    def fails() -> None:
        raise AssertionError("a defect")

    worker, done = Worker("test-worker"), threading.Event()
    raised: list[object] = []
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        worker.put(fails, 8)
        worker.put(done.set, 8)
        assert done.wait(600)
        assert worker.wait(600)
    finally:
        threading.excepthook = hook
    assert len(raised) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_threads_switch_sooner_while_a_worker_has_jobs() -> None:
    before = sys.getswitchinterval()
    worker, release = Worker("test-worker"), threading.Event()

    def job() -> None:
        release.wait(600)

    worker.put(job, 8)
    assert sys.getswitchinterval() == pytest.approx(background.SWITCH_SECONDS)
    child = os.fork()
    if child == 0:
        # A forked process has no worker.
        os._exit(0 if sys.getswitchinterval() == before else 1)
    release.set()
    assert worker.wait(600)
    assert sys.getswitchinterval() == before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_preparations_of_its_parent() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with SESSION.preparing, SESSION.adding:
            held.set()
            release.wait(600)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(600)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        with SESSION.preparing, SESSION.adding:
            os._exit(0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_idle_worker_ends() -> None:
    ended, done = threading.Event(), threading.Event()
    worker = Worker("test-worker", ended.set, linger=0.05)
    worker.put(done.set, 8)
    assert ended.wait(600)
    assert done.is_set()
    done.clear()
    worker.put(done.set, 8)
    assert done.wait(600)


def test_a_worker_ends_when_the_process_does() -> None:
    started, release = threading.Event(), threading.Event()
    worker = Worker("test-worker", at_exit=release.set)
    skipped: list[None] = []

    def job() -> None:
        started.set()
        release.wait(600)

    worker.put(job, 8)
    worker.put(lambda: skipped.append(None), 8)
    started.wait(600)
    worker._stop()
    assert worker.wait(0)
    assert not skipped
