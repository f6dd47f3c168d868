"""Removal of branches that a config cannot take."""

import ast
import textwrap

import pytest

from flashtune.templates import dead_branches
from flashtune.templates.dead_branches import remove_dead_branches

FLAGS = {"YES": True, "NO": False}


def removed(source: str) -> str:
    return remove_dead_branches(textwrap.dedent(source), FLAGS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if YES:\n    a = 1\nelse:\n    a = 2\n", "a = 1\n"),
        ("if NO:\n    a = 1\nelse:\n    a = 2\n", "a = 2\n"),
        ("a = 0\nif NO:\n    a = 1\n", "a = 0\n"),
        ("if NO:\n    a = 1\nelif YES:\n    a = 2\nelse:\n    a = 3\n", "a = 2\n"),
        ("if NO:\n    a = 1\nelif x:\n    a = 2\nelse:\n    a = 3\n", "if x:\n    a = 2\nelse:\n    a = 3\n"),
        (
            "if x:\n    a = 1\nelif YES:\n    a = 2\nelse:\n    a = 3\n",
            "if x:\n    a = 1\nelse:\n    a = 2\n",
        ),
        ("if x:\n    a = 1\nelif NO:\n    a = 2\n", "if x:\n    a = 1\n"),
        ("if YES:\n    if not NO:\n        if x:\n            a = 1\n", "if x:\n    a = 1\n"),
        ("if x:\n    if YES:\n        a = 1\n    b = 2\n", "if x:\n    a = 1\n    b = 2\n"),
    ],
)
def test_statements_on_flags_become_their_branch(source: str, expected: str) -> None:
    assert removed(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b if YES else c", "a = b"),
        ("a = (b if NO else c) * 2", "a = c * 2"),
        ("a = (b if NO else c + d) * 2", "a = (c + d) * 2"),
        ("f(b if YES else c)", "f(b)"),
        ("a = b if NO else (c if YES else d)", "a = c"),
        ("a = YES and b and NO or c", "a = c"),
        ("a = YES and b > 1", "a = b > 1"),
        ("a = (NO or b) * 2", "a = b * 2"),
        ("a = b and YES and c", "a = b and c"),
        ("a = b and c and not NO", "a = b and c"),
        ("a = (NO or YES) and b and c", "a = b and c"),
        ("a = f(YES and b)", "a = f(b)"),
        ("a = b if True and NO else c", "a = c"),
    ],
)
def test_expressions_on_flags_become_their_operand(source: str, expected: str) -> None:
    assert removed(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(a, *((b, c) if YES else ()), d)", "f(a, b, c, d)"),
        ("f(a, *((b, c) if NO else ()), d)", "f(a, d)"),
        ("f(a, *((b,) if NO else ()))", "f(a)"),
        ("f(a, *((b,) if NO else ()), *((c,) if NO else ()))", "f(a)"),
        ("f(a, *((b,) if YES else ()), *((c,) if NO else ()))", "f(a, b)"),
        ("f(*((b,) if NO else (c,)))", "f(c)"),
        ("f(*(b if YES else c))", "f(*b)"),
        ("f(\n    a,\n    *((b,) if NO else ()),\n    c,\n)\n", "f(\n    a,\n    c,\n)\n"),
    ],
)
def test_starred_tuples_add_arguments(source: str, expected: str) -> None:
    assert removed(source) == expected


def test_comments_stay_with_their_branch() -> None:
    source = """\
        # before
        if YES:
            # inside
            a = 1
            # end of the branch
        else:
            # other
            a = 2
            # end of the other branch
        # after
        b = 1
    """
    assert removed(source) == "# before\n# inside\na = 1\n# end of the branch\n# after\nb = 1\n"


def test_source_without_flags_stays() -> None:
    source = "def f(x):\n    if x and (y or z):\n        return [*a, *b]\n    return x if y else z\n"
    assert removed(source) == source


def test_parse_is_repeated_after_a_system_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 2

    def failing(source: str) -> ast.Module:
        if failures:
            raise failures.pop()
        return parse(source)

    monkeypatch.setattr(ast, "parse", failing)
    assert removed("if YES:\n    a = 1\n") == "a = 1\n"
    failures += [SystemError("always")] * dead_branches.PARSES
    with pytest.raises(SystemError, match="always"):
        removed("a = 1\n")


def test_removed_statements_leave_no_double_blank_lines() -> None:
    source = "def f():\n    a = 1\n\n    if NO:\n        b = 2\n\n    return a\n"
    assert removed(source) == "def f():\n    a = 1\n\n    return a\n"
