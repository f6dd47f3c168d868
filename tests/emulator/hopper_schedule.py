"""Executes the tile scheduler functions of a Hopper kernel's source in Python."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    return render(FAMILY, problem, a_config(problem, **changes), PLAIN)


def in_python(kernel: Kernel, name: str) -> Callable[..., Any]:
    """An integer function of the kernel's source, as a Python function."""
    (function,) = (node for node in ast.parse(kernel.source).body if getattr(node, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    gl = SimpleNamespace(
        where=lambda test, yes, no: yes if test else no,
        minimum=min,
        maximum=max,
        load=lambda place: place.values[place.offset],
    )
    module = load_module(kernel)
    constants = {name: getattr(module, name, None) for name in ("BLOCK_N", "PACK", "TILE", "LEFT", "RIGHT")}
    names: dict[str, Any] = {
        "gl": gl,
        **{name: one.value for name, one in constants.items() if one is not None},
    }
    if name == "seek":
        names["locate"] = in_python(kernel, "locate")
    exec(compile(ast.Module([function], []), name, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


class Place(NamedTuple):
    """A pointer for `gl.load` of such a function."""

    values: list[int]
    offset: int = 0

    def __add__(self, steps: object) -> Place:
        assert isinstance(steps, int)
        return Place(self.values, self.offset + steps)


CAUSAL = a_problem(64, causal=Causal.BOTTOM_RIGHT)
LOCATES = {
    (order, pack): in_python(kernel_of(CAUSAL, order=order, pack_gqa=pack), "locate")
    for order in ("linear", "lpt", "serpentine")
    for pack in (1, 4)
}
COUNTS = {
    causal: in_python(kernel_of(problem), "count_blocks")
    for causal in Causal
    for problem in [a_problem(64, causal=causal)]
}
