"""Tests of the binary cache: compilation, loading and their failures happen once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel
from flashtune.core.target import Target, find_target
from flashtune.launch import kernel_cache
from flashtune.launch.binding import Binary
from flashtune.launch.kernel_cache import binary_of
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem

H200 = find_target("h200")
CPU = torch.device("cpu")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel_cache._compiled.cache_clear()
    problem = a_problem(64)
    yield render(FAMILY, problem, a_config(problem), PLAIN)
    kernel_cache._compiled.cache_clear()


def test_failed_compilation_is_cached(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Kernel] = []

    def refuse(kernel: Kernel, target: Target) -> Binary:
        asked.append(kernel)
        raise KernelError("PTXASError: out of registers")

    monkeypatch.setattr(kernel_cache, "compile_binary", refuse)
    for _ in range(3):
        with pytest.raises(KernelError, match="out of registers"):
            binary_of(kernel, H200, CPU)
    assert len(asked) == 1


def test_every_part_is_loaded_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = {"main": "kernel", "combine": "epilogue"}
    loaded: list[tuple[object, torch.device]] = []
    monkeypatch.setattr(kernel_cache, "compile_binary", lambda *_: made)
    monkeypatch.setattr(kernel_cache, "load", lambda *part: loaded.append(part))
    for _ in range(2):
        assert binary_of(kernel, H200, CPU) is made
    assert loaded == [("kernel", CPU), ("epilogue", CPU)]


def test_failed_load_is_cached(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(part: object, device: torch.device) -> None:
        asked.append(part)
        raise KernelError("out of resource: shared memory")

    monkeypatch.setattr(kernel_cache, "compile_binary", lambda *_: {"main": "kernel"})
    monkeypatch.setattr(kernel_cache, "load", refuse)
    for _ in range(3):
        with pytest.raises(KernelError, match="shared memory"):
            binary_of(kernel, H200, CPU)
    assert asked == ["kernel"]


def test_other_errors_are_not_cached(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = {"main": object()}
    answers: list[Binary | Exception] = [OSError("disk full"), made]

    def compile_binary(kernel: Kernel, target: Target) -> Binary:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernel_cache, "compile_binary", compile_binary)
    monkeypatch.setattr(kernel_cache, "load", lambda *_: None)
    with pytest.raises(OSError, match="disk full"):
        binary_of(kernel, H200, CPU)
    assert binary_of(kernel, H200, CPU) is made
    assert binary_of(kernel, H200, CPU) is made
