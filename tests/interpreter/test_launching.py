"""Tests of launches under Triton's interpreter: skipped work, and restoration of Triton."""

import dataclasses
import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from flashtune import PagedKVCache
from flashtune.launch.compilation import launching

BUILDER = interpreter.interpreter_builder
ROWS = 8


@triton.jit  # type: ignore[untyped-decorator]
def doubled(x: Any) -> Any:
    return tl.cdiv(2 * x, 1)


@triton.jit  # type: ignore[untyped-decorator]
def double(x: Any, out: Any) -> None:
    row = tl.program_id(0)
    tl.store(out + row, doubled(tl.load(x + row)))


def run(rows: int = ROWS) -> list[int]:
    """The first rows of twice 0, 1, 2 …, in a launch of a program for each."""
    x = torch.arange(ROWS, dtype=torch.int32)
    out = torch.zeros_like(x)
    with launching():
        double[rows,](x, out)
    numbers: list[int] = out.tolist()
    return numbers


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that the interpreter calls: `replace` for Triton's own, `check` for debug mode alone."""
    names: list[str] = []

    def count(holder: object, attribute: str, name: str) -> None:
        function = getattr(holder, attribute)

        def counted(*arguments: Any) -> Any:
            names.append(name)
            return function(*arguments)

        monkeypatch.setattr(holder, attribute, counted)

    count(interpreter, "_patch_builtin", "replace")
    count(TritonSemantic, "device_assert", "check")
    return names


@pytest.mark.tritons
def test_functions_are_patched_once_per_launch(called: list[str]) -> None:
    # The first call of a function adds names to its module.
    run(1)
    called.clear()
    assert run(1) == [0] * ROWS
    once = called.count("replace")
    called.clear()
    assert run() == [2 * row for row in range(ROWS)]
    assert called.count("replace") == once > 0


@pytest.mark.tritons
def test_overflow_is_checked_only_in_debug_mode(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    assert "check" not in called
    monkeypatch.setattr(BUILDER, "options", dataclasses.replace(BUILDER.options, debug=True))
    run()
    assert "check" in called


@pytest.mark.tritons
def test_interpreter_is_restored_after_launches_and_failures() -> None:
    before = BUILDER.options, interpreter._patch_lang
    run()
    assert before == (BUILDER.options, interpreter._patch_lang)
    with pytest.raises(triton.runtime.errors.InterpreterError), launching():
        double[ROWS,](torch.zeros(ROWS), None)
    assert before == (BUILDER.options, interpreter._patch_lang)


def test_append_excludes_concurrent_kernels() -> None:
    cache = PagedKVCache(1, 16, 1, 16, dtype=torch.float32, device="cpu")
    rows = torch.ones(1, 1, 16)
    waiting = threading.Thread(target=cache.append, args=(rows, rows, torch.zeros(1, dtype=torch.int64)))
    with launching():
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join()
    assert (cache.keys[0, 0, 0] == 1).all()
