"""Every branch that templates take for shipped kernels is taken for a kernel with a checksum in tests/golden.

A branch is a condition of a template and its value:
of `if`, of `x if y else z`, of each side of `and` and `or`, and whether a loop runs. Conditions are those of
Jinja, and those of Python on flags.
"""

import ast
from collections.abc import Callable
from typing import TypeVar

import jinja2
import pytest
from jinja2 import nodes

from flashtune.core.kernel import Kernel
from flashtune.core.record import Record
from flashtune.templates import dead_branches, rendering
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from scripts.kernels import shipped_records
from tests.support.golden_kernels import KERNELS

pytestmark = pytest.mark.slow

Branch = tuple[str, int, int, bool]  # template, line, number of the condition, its value
Value = TypeVar("Value")


class Recorded(jinja2.Environment):
    """Templates as rendering has them, whose every condition passes through `take`."""

    def __init__(self, base: jinja2.Environment) -> None:
        super().__init__(loader=base.loader, undefined=base.undefined, autoescape=base.autoescape)
        self.trim_blocks, self.lstrip_blocks = base.trim_blocks, base.lstrip_blocks
        self.keep_trailing_newline = base.keep_trailing_newline
        self.taken: set[Branch] = set()
        self.globals |= {**base.globals, "take": self._take}

    def _take(self, template: str, line: int, number: int, value: Value) -> Value:
        self.taken.add((template, line, number, bool(value)))
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        numbers = iter(range(10**6))

        def recorded(condition: nodes.Expr) -> nodes.Expr:
            line = condition.lineno
            arguments = [nodes.Const(value) for value in (name, line, next(numbers))]
            take = nodes.Name("take", "load")
            return nodes.Call(take, [*arguments, condition], [], None, None, lineno=line)

        for branch in [*tree.find_all(nodes.If)]:
            assert isinstance(branch.test, nodes.Expr)
            branch.test = recorded(branch.test)
        for choice in [*tree.find_all(nodes.CondExpr)]:
            choice.test = recorded(choice.test)
        for both in [*tree.find_all((nodes.And, nodes.Or))]:
            both.left, both.right = recorded(both.left), recorded(both.right)
        for loop in [*tree.find_all(nodes.For)]:
            loop.iter = recorded(nodes.Filter(loop.iter, "list", [], [], None, None, lineno=loop.lineno))
            if isinstance(loop.test, nodes.Expr):
                loop.test = recorded(loop.test)
        tree.set_environment(self)
        return tree


class RecordedFlags(dead_branches._Remover):
    """Removal of branches that records each condition on flags, by its function and text."""

    taken: set[Branch]
    function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.function = node.name
        self.generic_visit(node)
        self.function = ""

    def _fold(self, node: ast.expr) -> bool | None:
        value = super()._fold(node)
        if value is not None:
            self.taken.add((f"{self.function}: {ast.unparse(node)}", 0, 0, value))
        return value


Branches = Callable[[Callable[[], Kernel]], frozenset[Branch]]


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> Branches:
    """Gives the branches that a function takes, which renders."""
    environment = Recorded(rendering._environment())
    monkeypatch.setattr(rendering, "_environment", lambda: environment)
    monkeypatch.setattr(dead_branches, "_Remover", RecordedFlags)
    RecordedFlags.taken = environment.taken

    def taken(rendered: Callable[[], Kernel]) -> frozenset[Branch]:
        environment.taken.clear()
        rendered()
        return frozenset(environment.taken)

    return taken


def of_record(record: Record) -> Callable[[], Kernel]:
    config = record.config
    assert config is not None
    return lambda: render(find_family(record.family), record.problem, config, record.specialization)


def test_every_branch_of_shipped_kernels_is_in_a_golden_kernel(branches: Branches) -> None:
    taken = frozenset[Branch]().union(*(branches(kernel) for kernel in KERNELS.values()))
    assert len(taken) > 2000
    shipped = {record.kernel: record for record in shipped_records() if record.config is not None}
    for record in shipped.values():
        missing = sorted(branches(of_record(record)) - taken)
        assert missing == [], f"add a golden kernel like {record.family} of {record.problem.key}"
