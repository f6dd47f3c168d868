"""Tests of machine faults: they stop a search with one sentence and are not stored as outcomes."""

import os
import resource
import time
from typing import Any

import pytest

from flashtune import testing
from flashtune.core.errors import MachineError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Outcome
from flashtune.core.target import Target, find_target
from flashtune.db.store import Store
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution import compile_pool, processes
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool, build_late, compile_candidate
from flashtune.tuner.execution.gpu_jobs import evaluate_candidate, prepare
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.tuner.execution.machine_probe import Probe, fault_of, look_for_fault, start_probe
from flashtune.tuner.execution.processes import LostJob
from flashtune.verification.schedule_fuzzing import delayed
from tests.tuner.search import fakes
from tests.tuner.search.conftest import Jobs
from tests.tuner.search.fakes import FAMILY, FakeCompiler, FakeMeasurer, a_config, by_tile
from tests.tuner.search.small_search import search

CANDIDATE = Candidate(FAMILY, a_config())
WAIT = 600.0
WELL = Probe("")
STORED = "what was finished is stored, and the same command goes on"


def test_killed_compiler_process_is_no_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[compile_candidate] = fakes.kill_itself
    with (
        CompilePool(1) as pool,
        pytest.raises(MachineError, match=rf"a compiler process was killed \(signal 9\).*; {STORED}"),
    ):
        pool.submit(scope, CANDIDATE).result(WAIT)


def test_full_disk_in_a_compiler_process_is_no_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[compile_candidate] = fakes.compile_without_space
    with CompilePool(1) as pool, pytest.raises(MachineError, match="No space left on device"):
        pool.submit(scope, CANDIDATE).result(WAIT)


@pytest.mark.parametrize(
    "job", [fakes.crash, fakes.hang, fakes.fail_with_a_tool], ids=lambda job: job.__name__
)
def test_compile_failure_on_a_faulty_machine_is_no_outcome(scope: SearchTask, jobs: Jobs, job: Any) -> None:
    jobs[look_for_fault] = fakes.triton_cache_full
    jobs[compile_candidate] = job
    with CompilePool(1, seconds=1.0) as pool, pytest.raises(MachineError, match=f"cache is full; {STORED}"):
        pool.submit(scope, CANDIDATE).result(WAIT)


@pytest.mark.usefixtures("healthy_machine")
def test_tool_failure_on_a_healthy_machine_is_an_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[compile_candidate] = fakes.fail_with_a_tool
    with CompilePool(1) as pool:
        assert pool.submit(scope, CANDIDATE).result(WAIT).outcome is Outcome.COMPILE_ERROR


@pytest.mark.parametrize("job", [fakes.crash, fakes.fail_with_a_tool], ids=lambda job: job.__name__)
def test_compile_failure_that_passes_is_no_outcome(scope: SearchTask, jobs: Jobs, job: Any) -> None:
    class Recovering(CompilePool):
        def _start(self, *args: Any, again: bool) -> None:
            jobs[compile_candidate] = job if again else fakes.compile_well
            super()._start(*args, again=again)

    with Recovering(1) as pool:
        assert pool.submit(scope, CANDIDATE).result(WAIT).outcome is Outcome.OK


def test_stopped_pool_does_not_restart_lost_jobs(
    scope: SearchTask, monkeypatch: pytest.MonkeyPatch, jobs: Jobs
) -> None:
    jobs[compile_candidate] = fakes.hang
    with CompilePool(1) as pool:
        submitted = [pool.submit(scope, CANDIDATE) for _ in range(3)]
        time.sleep(0.5)
        started: list[int] = []
        monkeypatch.setattr(processes, "start_pool", started.append)
    time.sleep(0.5)
    assert started == []
    assert all(job.cancelled() or not job.done() for job in submitted)


def test_killed_gpu_process_is_no_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[prepare] = fakes.succeed
    jobs[evaluate_candidate] = fakes.kill_itself
    with GpuWorker(0) as gpu, pytest.raises(MachineError, match=r"runs kernels was killed \(signal 9\)"):
        gpu.evaluate(scope, CANDIDATE, fakes.compiled(CANDIDATE), None).result(WAIT)


@pytest.mark.parametrize("job", [fakes.crash, fakes.hang], ids=lambda job: job.__name__)
def test_launch_failure_on_a_faulty_machine_is_no_outcome(scope: SearchTask, jobs: Jobs, job: Any) -> None:
    jobs[prepare] = fakes.succeed
    jobs[evaluate_candidate] = job
    jobs[look_for_fault] = fakes.triton_cache_full
    with GpuWorker(0, seconds=1.0) as gpu, pytest.raises(MachineError, match="cache is full"):
        gpu.evaluate(scope, CANDIDATE, fakes.compiled(CANDIDATE), None).result(WAIT)


def test_machine_probe_compiles_a_kernel_in_a_new_process(jobs: Jobs) -> None:
    assert start_probe(find_target("a100")).result(WAIT).fault == ""
    jobs[look_for_fault] = fakes.crash
    assert "died" in start_probe(find_target("a100")).result(WAIT).fault
    jobs.seconds = 1.0
    jobs[look_for_fault] = fakes.hang
    assert "this machine is too busy" in start_probe(find_target("a100")).result(WAIT).fault


def test_machine_probe_names_an_unwritable_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    assert f"the Triton cache {tmp_path}/file/triton cannot" in look_for_fault(find_target("a100")).fault


def test_timeout_is_an_outcome_only_on_an_idle_machine(load: list[float]) -> None:
    timed_out = LostJob(True, "did not end within its time limit")
    assert fault_of(timed_out, WELL, "a process") == ""
    assert "too busy (4 programs for each core)" in fault_of(timed_out, Probe("", slowness=4.0), "a process")
    # The load of the last minute counts, though it may be gone when the probe runs.
    load[0] = 5.0 * (os.cpu_count() or 1)
    assert "too busy (5 programs for each core)" in fault_of(timed_out, WELL, "a process")


def test_crash_is_an_outcome_unless_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = LostJob(False, "its process died (killed by signal 6)", 6)
    limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert fault_of(crashed, WELL, "a process") == ""
    limit = 2 << 30
    assert "crashed under a limit of memory" in fault_of(crashed, WELL, "a process")


def test_finished_gpu_results_are_stored_on_a_full_disk(store: Store) -> None:
    seen: list[Candidate] = []

    def judge(candidate: Candidate) -> Any:
        seen.append(candidate)
        if len(seen) > 5:
            raise MachineError("the disk is full")
        return fakes.compiled(candidate)

    measurer = FakeMeasurer(by_tile)
    with pytest.raises(MachineError):
        search(store, measurer, FakeCompiler(judge))
    assert len(store.records()) == len(measurer.seen) > 0


H200 = find_target("h200")
PROBLEM = testing.problem("heads=4,seqlen=512,head_dim=128,dtype=bf16")
ASSUMED = Specialization()


def default(family: str) -> Candidate:
    return Candidate(family, find_family(family).default(PROBLEM, H200))


@pytest.mark.parametrize(
    ("outcome", "family", "judged"),
    [
        (Outcome.OK, "forward_hopper", True),
        (Outcome.INFEASIBLE, "forward_hopper", False),
        (Outcome.COMPILE_ERROR, "forward_hopper", False),
        (Outcome.OK, "forward_q_outer", False),
    ],
)
def test_kernels_that_can_be_launched_with_delays(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, family: str, judged: bool
) -> None:
    seen: list[Kernel] = []

    def compiled(kernel: Kernel, target: Target) -> Compiled:
        seen.append(kernel)
        return Compiled(outcome)

    monkeypatch.setattr(compile_pool, "compile_kernel", compiled)
    candidate = default(family)
    assert build_late(PROBLEM, candidate, ASSUMED, H200) == judged
    late = delayed(render(find_family(family), PROBLEM, candidate.config, ASSUMED))
    assert seen == ([] if late is None else [late])
