"""Tests of the binary cache: compilation, loading and their failures happen once."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel
from flashtune.core.target import Target, find_target
from flashtune.launch.binding import Binary
from flashtune.launch.kernel_cache import Binaries
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem

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
