"""Removes the branches that a config cannot take from a rendered source.

Templates state conditions on features as Python: `if HAS_WINDOW:`, `a if IS_CAUSAL else b`,
`HAS_WINDOW and start < end`, `*((seed,) if DROPOUT else ())`. These flags are known when a kernel is
rendered, so that the rendered file contains only the chosen branches. Compilers call this dead branch
elimination.
"""

import ast
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

INDENT = 4
# Attempts to parse a source.
PARSES = 4
_parsing = threading.Lock()
# An indented line has at most one blank line before it, and other lines have at most two.
BLANK_LINES = re.compile(r"\n\n\n+(?= )"), re.compile(r"\n{4,}")
SIMPLE = ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.Tuple


def remove_dead_branches(source: str, flags: Mapping[str, bool]) -> str:
    """Returns a source in which each condition on flags is replaced by its chosen branch or operand.

    A flag is `True` or `False` by its name. These constants are conditions too, for arguments of macros. A
    comment belongs to the branch that has its indentation.
    """
    remover = _Remover(source, flags)
    remover.visit(parsed(source))
    result = BLANK_LINES[0].sub("\n\n", remover.result())
    return BLANK_LINES[1].sub("\n\n\n", result)


def parsed(source: str) -> ast.Module:
    """Returns the syntax tree of a source.

    Python 3.11 counts the recursion of parses in several threads together. A parse can then end with a
    SystemError, also because of a thread of another library. So parses here take turns, and are repeated.
    """
    with _parsing:
        for _ in range(PARSES - 1):
            with contextlib.suppress(SystemError):
                return ast.parse(source)
        return ast.parse(source)


class _Branch(NamedTuple):
    """A branch of an `if` statement: its header and the lines of its body, from 0."""

    header: int
    test: ast.expr | None
    body: list[ast.stmt]
    lines: range


class _Remover(ast.NodeVisitor):
    """Collects edits of a source."""

    def __init__(self, source: str, flags: Mapping[str, bool]) -> None:
        self._source = source
        self._flags = flags
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self._lines))]
        # Each edit is the start and the end of a part, as offsets, and its replacement.
        self._edits: list[tuple[int, int, str]] = []
        self._levels: Counter[int] = Counter()

    def result(self) -> str:
        """Returns the edited source. An edit inside of a deleted part has no effect."""
        indents = [
            (start, start + min(INDENT * levels, self._indent(line)), "")
            for line, levels in self._levels.items()
            for start in (self._starts[line],)
        ]
        kept: list[str] = []
        end = 0
        for start, stop, text in sorted(self._edits + indents, key=lambda edit: (edit[0], -edit[1])):
            if start >= end:
                kept += self._source[end:start], text
            end = max(end, stop)
        return "".join([*kept, self._source[end:]])

    # ---- statements

    def visit_If(self, node: ast.If) -> None:
        branches = list(self._branches(node))
        tests = [True if branch.test is None else self._fold(branch.test) for branch in branches]
        if tests[0] is None and not any(isinstance(test, bool) for test in tests[1:]):
            self._visit_kept(branches)
            return
        kept: list[_Branch] = []
        is_decided = False
        for branch, test in zip(branches, tests, strict=True):
            if is_decided or test is False:
                self._delete_lines(branch.header, branch.lines.stop)
                continue
            is_decided = test is True
            self._head(branch, first=not kept, is_last=is_decided)
            kept.append(branch)
        self._visit_kept(kept)

    def _visit_kept(self, branches: list[_Branch]) -> None:
        for branch in branches:
            for child in (branch.test, *branch.body):
                if child is not None:
                    self.visit(child)

    def _head(self, branch: _Branch, *, first: bool, is_last: bool) -> None:
        """Edits the header of a branch that remains, the first one or the last one of its statement."""
        column = self._starts[branch.header] + self._indent(branch.header)
        if first and is_last:
            self._delete_lines(branch.header, branch.lines.start)
            self._levels.update(branch.lines)
        elif is_last:
            self._edits.append((column, self._starts[branch.lines.start], "else:\n"))
        elif first and self._source.startswith("elif", column):
            self._edits.append((column, column + len("el"), ""))

    def _branches(self, node: ast.If) -> Iterator[_Branch]:
        header = node.lineno - 1
        column = node.col_offset
        while True:
            lines = self._body_lines(node.test.end_lineno or 0, node.body, column)
            yield _Branch(header, node.test, node.body, lines)
            header = lines.stop
            if not node.orelse:
                return
            following = node.orelse[0]
            if isinstance(following, ast.If) and self._lines[header].lstrip().startswith("elif"):
                node = following
                continue
            yield _Branch(header, None, node.orelse, self._body_lines(header + 1, node.orelse, column))
            return

    def _body_lines(self, after: int, body: list[ast.stmt], column: int) -> range:
        """Returns the lines of a branch with its comments. Its header ends at the line before `after`."""
        stop = body[-1].end_lineno or 0
        line = stop
        while line < len(self._lines) and (text := self._lines[line].lstrip()).startswith(("#", "\n")):
            line += 1
            if text.startswith("#") and self._indent(line - 1) > column:
                stop = line
            elif text.startswith("#"):
                break
        start = after - 1
        while not self._lines[start].split("#")[0].rstrip().endswith(":"):
            start += 1
        return range(start + 1, stop)

    def _delete_lines(self, first: int, stop: int) -> None:
        self._edits.append((self._starts[first], self._starts[stop], ""))

    def _indent(self, line: int) -> int:
        text = self._lines[line]
        return len(text) - len(text.lstrip(" "))

    # ---- expressions

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips formatted strings: before Python 3.12 their parts have no positions."""

    def visit_IfExp(self, node: ast.IfExp) -> None:
        test = self._fold(node.test)
        if test is None:
            self.generic_visit(node)
            return
        self._replace(node, node.body if test else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        kept = [value for value in node.values if self._fold(value) is None]
        if self._fold(node) is not None or len(kept) == len(node.values):
            self.generic_visit(node)
            return
        if len(kept) == 1:
            self._replace(node, kept[0])
            return
        spans = [self._span(value) for value in node.values]
        end = self._span(kept[-1])[1]
        for value, span, following in zip(node.values, spans, [*spans[1:], None], strict=True):
            if value not in kept and following:
                self._edits.append((span[0], following[0], ""))
            self.visit(value)
        self._edits.append((end, spans[-1][1], ""))

    def visit_Starred(self, node: ast.Starred) -> None:
        value = node.value
        test = self._fold(value.test) if isinstance(value, ast.IfExp) else None
        if test is None or not isinstance(value, ast.IfExp):
            self.generic_visit(node)
            return
        chosen = value.body if test else value.orelse
        start, stop = self._place(node)
        if not isinstance(chosen, ast.Tuple):
            self._edits.append((start + 1, self._place(chosen)[0], ""))
            self._edits.append((self._place(chosen)[1], stop, ""))
            self.visit(chosen)
        elif chosen.elts:
            first, last = self._span(chosen.elts[0])[0], self._span(chosen.elts[-1])[1]
            self._edits += [(start, first, ""), (last, stop, "")]
            self.generic_visit(chosen)
        else:
            self._delete_element(start, stop)

    def _delete_element(self, start: int, stop: int) -> None:
        """Deletes an element of a list with its comma, and its line if nothing else is there."""
        after = re.compile(r",[ ]*").match(self._source, stop)
        if not after:
            # The comma to delete is before the deleted elements that end here.
            for first, last, text in reversed(self._edits):
                start = first if last == start and not text else start
        before = re.compile(r",\s*$").search(self._source[:start])
        if after:
            stop = after.end()
            line = self._source.rfind("\n", 0, start) + 1
            if not self._source[line:start].strip() and self._source.startswith("\n", stop):
                start, stop = line, stop + 1
        elif before:
            start = before.start()
        self._edits.append((start, stop, ""))

    def _replace(self, node: ast.expr, chosen: ast.expr) -> None:
        """Replaces an expression by one of its operands, without parentheses that this makes redundant."""
        outer = self._place(node)
        start, stop = self._span(chosen, outer)
        around = self._parentheses(outer)
        if around and isinstance(chosen, SIMPLE):
            before = self._source[: around[0]][-1:]
            if not (before.isalnum() or before in "_)]"):
                outer = around
        self._edits += [(outer[0], start, ""), (stop, outer[1], "")]
        self.visit(chosen)

    def _fold(self, node: ast.expr) -> bool | None:
        """Returns the value of a condition on flags, or None if it depends on anything else."""
        if isinstance(node, ast.Name):
            return self._flags.get(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._fold(node.operand)
            return None if value is None else not value
        if isinstance(node, ast.BoolOp):
            values = [self._fold(value) for value in node.values]
            decisive = isinstance(node.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        return None

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Returns the start and the end of a node, as offsets. The source is ASCII."""
        end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def _span(self, node: ast.expr, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        """Returns the place of an operand with the parentheses around it."""
        span = self._place(node)
        while (around := self._parentheses(span)) and (
            limits is None or (limits[0] <= around[0] and around[1] <= limits[1])
        ):
            span = around
        return span

    def _parentheses(self, span: tuple[int, int]) -> tuple[int, int] | None:
        start, stop = span
        while self._source[start - 1 : start].isspace():
            start -= 1
        while self._source[stop : stop + 1].isspace():
            stop += 1
        if self._source[start - 1 : start] == "(" and self._source[stop : stop + 1] == ")":
            return start - 1, stop + 1
        return None
