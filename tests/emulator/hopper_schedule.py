"""Executes the tile scheduler functions of a Hopper kernel's source in Python."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.dead_branches import parsed
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    return render(FAMILY, problem, a_config(problem, **changes), PLAIN)


def in_python(kernel: Kernel, name: str) -> Callable[..., Any]:
    """An integer function or a method of the kernel's scheduler, as a Python function.

    A method gets the scheduler's fields after its arguments. A function of blocks gets the lengths of the
    sequence in place of a tile.
    """
    tree = parsed(kernel.source)
    used = {"Tile", "TileScheduler", "key_start", "key_stop", name}
    wanted = [node for node in tree.body if getattr(node, "name", "") in used]
    gl = SimpleNamespace(
        where=lambda test, yes, no: yes if test else no,
        minimum=min,
        maximum=max,
        load=lambda pointer: pointer.values[pointer.offset],
        tensor=int,
        constexpr=int,
    )
    module = load_module(kernel)
    constants = {
        name: getattr(module, name, None)
        for name in ("BLOCK_N", "PACK", "TILE_POSITIONS", "LEFT", "RIGHT", "CHUNK", "CHUNK_TILES")
    }
    names: dict[str, Any] = {
        "gl": gl,
        "gluon": SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function),
        "aggregate": lambda function: function,
        **{name: value.value for name, value in constants.items() if value is not None},
    }
    exec(compile(ast.Module(wanted, []), name, "exec"), names)
    if name in names:
        return lambda m_start, span, seqlen_q, seqlen_kv: names[name](
            SimpleNamespace(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), m_start, span
        )
    fields = [*names["TileScheduler"].__annotations__]

    def method(index: int, num_programs: int, *schedule: Any) -> Any:
        # Fields that a test leaves out are not used.
        scheduler = names["TileScheduler"](*schedule, *[None] * (len(fields) - len(schedule)))
        return getattr(scheduler, name)(index, num_programs)

    return method


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
    causal: in_python(kernel_of(problem), "get_n_block_max")
    for causal in Causal
    for problem in [a_problem(64, causal=causal)]
}
