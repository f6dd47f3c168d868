"""Tests that Triton carries all variables of the loops of Gluon kernels.

Triton visits the body of a loop once to find the variables that it changes. A name that has the value of
another name before the loop, and gets that name's value in the loop, looks unchanged. Triton then uses its
first value in all iterations, without an error. The emulator does not show this.
"""

import ast
from collections.abc import Iterable

import pytest

from flashtune.templates.dead_branches import parsed
from tests.support.golden_kernels import COMBINATIONS
from tests.templates.test_golden import rendered_kernel

GLUON = [name for name in COMBINATIONS if name.startswith("hopper")]
Values = dict[str, object]


def lost_carries(source: str) -> set[str]:
    """Returns the names that loops of jitted functions change and Triton takes for unchanged."""
    functions = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.FunctionDef)]
    lost: set[str] = set()
    for function in functions:
        _run(function.body, {}, lost)
    return lost


def _run(body: Iterable[ast.stmt], values: Values, lost: set[str]) -> None:
    """Runs statements on values that are equal only if one name was assigned to another."""
    for statement in body:
        if isinstance(statement, ast.Assign):
            _assign(statement.targets[0], statement.value, values)
        elif isinstance(statement, (ast.For, ast.While)):
            # `dry` repeats Triton's first pass over the body; in `apart` no two names are equal.
            dry, apart = dict(values), {name: object() for name in values}
            begun = dict(apart)
            _run(statement.body, dry, lost)
            _run(statement.body, apart, set())
            for name, value in values.items():
                if dry[name] is value and apart[name] is not begun[name]:
                    lost.add(name)
            values.update({name: object() for name in _assigned(statement)})
        elif isinstance(statement, ast.If):
            for branch in (statement.body, statement.orelse):
                _run(branch, dict(values), lost)
            values.update({name: object() for name in _assigned(statement)})
        else:
            values.update({name: object() for name in _assigned(statement)})


def _assign(target: ast.expr, value: ast.expr, values: Values) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        elements = [_value(element, values) for element in value.elts]
        names = [element.id for element in target.elts if isinstance(element, ast.Name)]
        values.update(dict(zip(names, elements, strict=True)))
    elif isinstance(target, ast.Name):
        values[target.id] = _value(value, values)
    else:
        values.update({name: object() for name in _assigned(target)})


def _value(value: ast.expr, values: Values) -> object:
    return values.setdefault(value.id, object()) if isinstance(value, ast.Name) else object()


def _assigned(node: ast.AST) -> set[str]:
    names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


@pytest.mark.slow
@pytest.mark.parametrize("name", GLUON)
def test_variables_of_loops_are_carried(name: str) -> None:
    assert lost_carries(rendered_kernel(name).source) == set()


def test_lost_carries_are_found() -> None:
    source = rendered_kernel("hopper_bf16_d128_packed_sequences_pages").source
    right = "v_pages = gl.zeros([32], gl.int32, LANES)"
    assert right in source
    assert lost_carries(source.replace(right, "v_pages = k_pages")) == {"v_pages"}
    assert lost_carries(source.replace(right, "v_pages = load_pages(scheduler, this, n_last)")) == set()
    assert lost_carries("def f(a):\n    b, c = a, a\n    for i in range(3):\n        b, c = c + 1, b\n") == {
        "c"
    }
