"""Tests of the process that compiles kernels for the worker thread, and of the cache of binaries."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.config import LaunchOptions
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel, Specialization, Step
from flashtune.core.record import Record
from flashtune.core.target import Target, find_target
from flashtune.launch import binding, compiler_process
from flashtune.launch.binding import Binary, compile_binary
from flashtune.launch.compilation import is_compiled
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import Binaries, kernel_of
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem
from tests.support.machine import PROBLEM
from tests.support.records import make_record

TARGET = find_target("h200")
NEEDED = Specialization(lse=True)


@pytest.fixture
def record() -> Record:
    return make_record(PROBLEM)


@pytest.fixture
def compiler() -> Iterator[CompilerProcess]:
    process = CompilerProcess()
    yield process
    process.close()


@pytest.mark.slow
def test_a_kernel_comes_from_another_process(
    record: Record, compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # Modules in the present folder are not imported.
    (tmp_path / "msgspec.py").write_text("raise SystemExit(1)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    want = kernel_of(record, NEEDED)
    assert not is_compiled(want, TARGET)
    loader = KernelLoader()
    loader.compile_apart(compiler, record, NEEDED, TARGET)
    assert [*loader.rendered.values()] == [want]
    assert is_compiled(want, TARGET)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))  # as torch.compile does
    assert not is_compiled(want, TARGET)
    loader.compile_apart(compiler, record, NEEDED, TARGET)
    assert is_compiled(want, TARGET)
    compiler._ask = None  # type: ignore[assignment, method-assign]
    loader.compile_apart(compiler, record, NEEDED, TARGET)  # sends nothing to the process
    process = compiler._process
    assert process is not None
    compiler.close()
    assert process.returncode == 0


def test_kernels_are_compiled_apart_for_each_gpu_and_after_their_eviction(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, targets = kernel_of(record, NEEDED), []

    class Evicting(CompilerProcess):
        """Renders kernels. Their binaries are not in Triton's cache afterwards."""

        def prepared(self, record: Record, specialization: Specialization, target: Target) -> Kernel:
            targets.append(target)
            return kernel

    loader, h100 = KernelLoader(), find_target("h100")
    loader.compile_apart(Evicting(), record, NEEDED, TARGET)
    assert loader.kernel_of(record, NEEDED, TARGET) is kernel
    assert loader.kernel_of(record, NEEDED, h100) is not kernel
    for target in (h100, TARGET):
        loader.compile_apart(Evicting(), record, NEEDED, target)
    assert targets == [TARGET, h100, TARGET]


@pytest.mark.slow
def test_failures_are_left_to_the_caller(
    record: Record, compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    other = msgspec.structs.replace(record, family="forward_masked")
    assert compiler.prepared(other, NEEDED, TARGET) is None
    assert compiler._process is None, "the process ended, because the config is another family's"

    # The executable of a frozen program is the program, and no process is started.
    monkeypatch.setattr("sys.frozen", True, raising=False)
    assert compiler.prepared(record, NEEDED, TARGET) is None
    with pytest.raises(OSError, match="no Python interpreter"):
        compiler_process._started()


def test_a_process_that_a_signal_ended_is_an_error(
    record: Record, compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    silent = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()"]
    compiler._process = subprocess.Popen(silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    threading.Timer(0.05, compiler.kill).start()
    with pytest.raises(KernelError, match="ended by signal 9"):
        compiler.prepared(record, NEEDED, TARGET)
    assert compiler._process is None


def test_a_partial_answer_is_left_to_the_caller(
    record: Record, compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler._ask = lambda line: b'{"source"'  # type: ignore[method-assign]
    assert compiler.prepared(record, NEEDED, TARGET) is None


def test_a_kernel_that_does_not_compile_is_not_in_the_cache(record: Record) -> None:
    kernel: Kernel = kernel_of(record, NEEDED)
    invalid = msgspec.structs.replace(kernel, source=kernel.source.replace("tl.dot(", "tl.missing("))
    assert not is_compiled(invalid, TARGET)


H200 = find_target("h200")
CPU = torch.device("cpu")


@pytest.fixture
def kernel() -> Kernel:
    problem = a_problem(64)
    return render(FAMILY, problem, a_config(problem), PLAIN)


def test_failed_compilation_is_cached(kernel: Kernel) -> None:
    asked: list[Kernel] = []

    def refuse(kernel: Kernel, target: Target) -> Binary:
        asked.append(kernel)
        raise KernelError("PTXASError: out of registers")

    binaries = Binaries(refuse)
    for _ in range(3):
        with pytest.raises(KernelError, match="out of registers"):
            binaries.of(kernel, H200, CPU)
    assert len(asked) == 1


def test_every_part_is_loaded_once(kernel: Kernel) -> None:
    made: Any = {"main": "kernel", "combine": "epilogue"}
    loaded: list[tuple[object, torch.device]] = []
    binaries = Binaries(lambda *_: made, lambda *part: loaded.append(part))
    for _ in range(2):
        assert binaries.of(kernel, H200, CPU) is made
    assert loaded == [("kernel", CPU), ("epilogue", CPU)]


def test_started_compilation_runs_in_a_thread_and_is_not_repeated(kernel: Kernel) -> None:
    made: Any = {"main": "kernel"}
    begun, threads = threading.Barrier(2, timeout=60), []

    def compile_binary(kernel: Kernel, target: Target) -> Binary:
        begun.wait()
        threads.append(threading.current_thread())
        return made  # type: ignore[no-any-return]

    binaries = Binaries(compile_binary, lambda *_: None)
    for _ in range(2):
        binaries.start(kernel, H200, CPU)
    begun.wait()
    assert binaries.of(kernel, H200, CPU) is made
    binaries.start(kernel, H200, CPU)
    assert binaries.of(kernel, H200, CPU) is made
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_failure_of_a_started_compilation_is_raised(kernel: Kernel) -> None:
    def refuse(kernel: Kernel, target: Target) -> Binary:
        raise KernelError("PTXASError: out of registers")

    binaries = Binaries(refuse)
    binaries.start(kernel, H200, CPU)
    with pytest.raises(KernelError, match="out of registers"):
        binaries.of(kernel, H200, CPU)


def test_parts_of_a_kernel_are_compiled_at_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("combine", (), LaunchOptions(num_warps=4, num_stages=1))
    both = threading.Barrier(2, timeout=60)

    def compile_kernel(part: Kernel, target: Target) -> str:
        both.wait()
        return f"binary of {part.entry}"

    monkeypatch.setattr(binding, "compile_kernel", compile_kernel)
    parts = (kernel.entry, "combine")
    binary = compile_binary(msgspec.structs.replace(kernel, epilogue=step), H200)
    assert [*binary.items()] == [(entry, f"binary of {entry}") for entry in parts]


def test_failed_load_is_cached(kernel: Kernel) -> None:
    asked: list[object] = []

    def refuse(part: object, device: torch.device) -> None:
        asked.append(part)
        raise KernelError("out of resource: shared memory")

    made: Any = {"main": "kernel"}
    binaries = Binaries(lambda *_: made, refuse)
    for _ in range(3):
        with pytest.raises(KernelError, match="shared memory"):
            binaries.of(kernel, H200, CPU)
    assert asked == ["kernel"]


def test_cached_error_keeps_no_tensors_of_callers(kernel: Kernel) -> None:
    def refuse(kernel: Kernel, target: Target) -> Binary:
        raise KernelError("PTXASError: out of registers")

    binaries = Binaries(refuse)

    def call(q: Tensor) -> None:
        with pytest.raises(KernelError):
            binaries.of(kernel, H200, q.device)

    for _ in range(2):
        q = torch.zeros(1)
        alive = weakref.ref(q)
        call(q)
        del q
        gc.collect()
        assert alive() is None


def test_other_errors_are_not_cached(kernel: Kernel) -> None:
    made: Any = {"main": object()}
    answers: list[Binary | Exception] = [OSError("disk full"), made]

    def compile_binary(kernel: Kernel, target: Target) -> Binary:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    binaries = Binaries(compile_binary, lambda *_: None)
    with pytest.raises(OSError, match="disk full"):
        binaries.of(kernel, H200, CPU)
    assert binaries.of(kernel, H200, CPU) is made
    assert binaries.of(kernel, H200, CPU) is made
