"""Tests of crashes and hangs of worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flashtune.core.errors import MachineError
from flashtune.core.record import Outcome
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution import processes
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool, build_late, compile_candidate
from flashtune.tuner.execution.evaluation import DeviceLostError
from flashtune.tuner.execution.gpu_jobs import (
    evaluate_candidate,
    evaluate_late,
    prepare,
    time_finalists,
)
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.tuner.execution.processes import Workers, start_pool, stop_pool
from tests.tuner.search import fakes
from tests.tuner.search.conftest import Jobs
from tests.tuner.search.fakes import FAMILY, a_config

CANDIDATE = Candidate(FAMILY, a_config())
WAIT = 600.0


def test_worker_compiles_a_kernel_without_a_gpu(scope: SearchTask) -> None:
    with CompilePool(1) as pool:
        result = pool.submit(scope, CANDIDATE).result(WAIT)
    assert result.outcome is Outcome.OK
    assert result.resources is not None
    assert result.resources.sram_bytes > 0
    assert result.kernel is not None


class FakePool:
    """A pool without processes. Its start takes a while."""

    active = True

    def __init__(self, made: list[FakePool]) -> None:
        self.stops = 0
        made.append(self)
        time.sleep(0.05)

    def schedule(self, *_: object, **__: object) -> Future[None]:
        return Future()

    def stop(self) -> None:
        self.stops += 1

    def join(self) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    pools: list[FakePool] = []
    monkeypatch.setattr(processes, "start_pool", lambda _: FakePool(pools))
    return pools


def test_threads_start_one_pool(made: list[FakePool]) -> None:
    workers = Workers(1)
    threads = [threading.Thread(target=workers.schedule, args=(print, (), 1.0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers.stop()
    assert [pool.stops for pool in made] == [1]


def test_stop_during_a_start_stops_the_pool(made: list[FakePool]) -> None:
    workers = Workers(1)
    thread = threading.Thread(target=workers.schedule, args=(print, (), 1.0))
    thread.start()
    while not made:
        time.sleep(0.001)
    workers.stop()
    thread.join()
    assert [pool.stops for pool in made] == [1]


def test_stopped_workers_start_nothing(made: list[FakePool]) -> None:
    workers = Workers(1)
    workers.stop()
    with pytest.raises(MachineError, match="were stopped"):
        workers.schedule(print, (), 1.0)
    assert made == []


def test_signal_to_the_process_group_ends_workers_but_not_the_server() -> None:
    pool = start_pool(1)
    try:
        worker_blocks, server_blocks = pool.schedule(fakes.blocked_by_worker_and_server).result(WAIT)
    finally:
        stop_pool(pool)
    assert signal.SIGTERM not in worker_blocks
    assert {signal.SIGTERM, signal.SIGINT} <= server_blocks


def test_kernel_that_exceeds_sram_is_infeasible(scope: SearchTask) -> None:
    big = Candidate(FAMILY, a_config(block_m=128, block_n=256, num_warps=8, num_stages=4))
    with CompilePool(1) as pool:
        result = pool.submit(scope, big).result(WAIT)
    assert result.outcome is Outcome.INFEASIBLE
    assert "SRAM" in result.message
    assert result.resources is not None


@pytest.mark.usefixtures("healthy_machine")
def test_compiler_crash_or_hang_is_an_outcome(scope: SearchTask, jobs: Jobs) -> None:
    with CompilePool(1, seconds=1.0) as pool:
        jobs[compile_candidate] = fakes.crash
        crashed = pool.submit(scope, CANDIDATE).result(WAIT)
        jobs[compile_candidate] = fakes.hang
        hung = pool.submit(scope, CANDIDATE).result(WAIT)
        jobs[compile_candidate] = fakes.compile_well
        assert pool.submit(scope, CANDIDATE).result(WAIT).outcome is Outcome.OK
    assert crashed == Compiled(
        Outcome.COMPILE_ERROR, message="compiling its process died (killed by signal 6)"
    )
    assert hung == Compiled(Outcome.TIMEOUT, message="compiling did not end within its time limit")


@pytest.mark.slow
def test_workers_use_one_thread() -> None:
    # A process of its own: the server that workers are forked from keeps the number that it started with.
    code = (
        "import torch; from flashtune.tuner.execution.processes import start_pool, stop_pool; "
        "pool = start_pool(1); "
        f"print(pool.schedule(torch.get_num_threads).result({WAIT})); stop_pool(pool)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.returncode) == ("1", 0), ended.stderr


@pytest.fixture
def healthy_gpu(healthy_machine: None, jobs: Jobs) -> None:
    jobs[prepare] = fakes.succeed


@pytest.mark.usefixtures("healthy_gpu")
def test_launch_crash_or_hang_is_an_outcome(scope: SearchTask, jobs: Jobs) -> None:
    compiled = fakes.compiled(CANDIDATE)
    with GpuWorker(0, seconds=1.5) as gpu:
        jobs[evaluate_candidate] = fakes.leave_with_illegal_access
        faulty = gpu.evaluate(scope, CANDIDATE, compiled, None).result(WAIT)
        jobs[evaluate_candidate] = fakes.crash
        crashed = gpu.evaluate(scope, CANDIDATE, compiled, None).result(WAIT)
        jobs[evaluate_candidate] = fakes.hang
        hung = gpu.evaluate(scope, CANDIDATE, compiled, None)
        # The next process does the jobs that wait behind a job that hangs.
        jobs[evaluate_candidate] = fakes.evaluate_right
        after = gpu.evaluate(scope, CANDIDATE, compiled, None)
        assert hung.result(WAIT).outcome is Outcome.TIMEOUT
        assert after.result(WAIT).outcome is Outcome.OK
    assert (faulty.outcome, faulty.message) == (Outcome.LAUNCH_ERROR, "illegal memory access")
    assert (crashed.outcome, crashed.message) == (
        Outcome.LAUNCH_ERROR,
        "running its process died (killed by signal 6)",
    )


def test_crash_due_to_a_lost_gpu_is_no_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[prepare] = fakes.lose_device
    jobs[evaluate_candidate] = fakes.crash
    with GpuWorker(0) as gpu:
        job = gpu.evaluate(scope, CANDIDATE, fakes.compiled(CANDIDATE), None)
        with pytest.raises(DeviceLostError, match="unplugged"):
            job.result(WAIT)


@pytest.mark.usefixtures("healthy_gpu")
def test_job_is_rerun_if_its_process_died_before_it_began(scope: SearchTask, jobs: Jobs) -> None:
    jobs[evaluate_candidate] = fakes.process_id
    compiled = fakes.compiled(CANDIDATE)
    with GpuWorker(0) as gpu:
        process: Any = gpu.evaluate(scope, CANDIDATE, compiled, None).result(WAIT)
        # Stopped, it cannot say that it took the job; the pool then breaks as a whole.
        os.kill(process, signal.SIGSTOP)
        jobs[evaluate_candidate] = fakes.evaluate_right
        lost = gpu.evaluate(scope, CANDIDATE, compiled, None)
        time.sleep(0.5)
        os.kill(process, signal.SIGKILL)
        assert lost.result(WAIT).outcome is Outcome.OK
        assert gpu.evaluate(scope, CANDIDATE, compiled, None).result(WAIT).outcome is Outcome.OK


@pytest.mark.usefixtures("healthy_gpu")
def test_kernel_that_hangs_or_crashes_with_delays_is_wrong(scope: SearchTask, jobs: Jobs) -> None:
    jobs[build_late] = fakes.agree
    evaluations = []
    with GpuWorker(0, seconds=0.5) as gpu:
        for job in (fakes.hang, fakes.leave_with_illegal_access, fakes.evaluate_right):
            jobs[evaluate_late] = job
            evaluations.append(gpu.evaluate_delayed(scope, CANDIDATE).result(WAIT))
    said = [(evaluation.outcome, evaluation.message) for evaluation in evaluations if evaluation is not None]
    assert said == [
        (Outcome.TIMEOUT, "delayed: running did not end within its time limit"),
        (Outcome.LAUNCH_ERROR, "delayed: illegal memory access"),
        (Outcome.OK, ""),
    ]


def test_lost_gpu_during_delays_is_no_outcome(scope: SearchTask, jobs: Jobs) -> None:
    jobs[prepare] = fakes.lose_device
    jobs[build_late] = fakes.agree
    jobs[evaluate_late] = fakes.crash
    with GpuWorker(0) as gpu, pytest.raises(DeviceLostError, match="unplugged"):
        gpu.evaluate_delayed(scope, CANDIDATE).result(WAIT)


@pytest.mark.usefixtures("healthy_gpu")
@pytest.mark.parametrize("build", [fakes.hang, fakes.crash, fakes.succeed], ids=lambda job: job.__name__)
def test_kernel_that_cannot_be_built_with_delays_has_no_verdict(
    scope: SearchTask, jobs: Jobs, build: Callable[..., Any]
) -> None:
    jobs.seconds = 1.0
    jobs[build_late] = build
    jobs[evaluate_late] = fakes.evaluate_right
    with GpuWorker(0) as gpu:
        assert gpu.evaluate_delayed(scope, CANDIDATE).result(WAIT) is None


@pytest.mark.usefixtures("healthy_gpu")
def test_final_measurement_is_empty_if_its_process_dies(scope: SearchTask, jobs: Jobs) -> None:
    jobs[time_finalists] = fakes.crash
    with GpuWorker(0) as gpu:
        assert gpu.finals(scope, (CANDIDATE,)).result(WAIT) == ()


def test_pool_ends_quickly_with_hanging_workers(scope: SearchTask, jobs: Jobs) -> None:
    jobs[compile_candidate] = fakes.hang
    with CompilePool(2) as pool:
        pool.submit(scope, CANDIDATE)
        pool.submit(scope, CANDIDATE)
        time.sleep(0.5)
        start = time.monotonic()
    assert time.monotonic() - start < WAIT


STUCK = f"""
import tempfile, time
from flashtune.tuner.cli import ended_by_signals
from flashtune.tuner.execution.processes import start_pool, stop_pool
with ended_by_signals():
    pool = start_pool(1)
    try:
        print(pool.schedule(tempfile.mkdtemp).result({WAIT}), flush=True)
        time.sleep({WAIT})
    finally:
        stop_pool(pool)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_no_temporary_folder(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        folder = Path(program.stdout.readline().strip())
        assert folder.is_dir()
        assert folder.is_relative_to(tmp_path)
        program.send_signal(number)
        program.wait(WAIT)
    assert list(tmp_path.iterdir()) == []


def test_processes_import_nothing_from_the_present_folder(tmp_path: Path) -> None:
    present = tmp_path / "present"
    present.mkdir()
    for name in ("selectors", "socket", "multiprocessing"):
        (present / f"{name}.py").write_text("open('imported', 'w')", encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(
        "from flashtune.tuner.execution import processes\n"
        "processes.PRELOADED = ()\n"
        "process = processes._context().Process(target=abs, args=(1,))\n"
        "process.start()\n"
        "process.join()\n",
        encoding="utf-8",
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, program], cwd=present, env=environment, check=False)
    assert not (present / "imported").exists()
    assert done.returncode == 0
