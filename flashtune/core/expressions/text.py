"""Functions as one word of a shape, and back."""

from __future__ import annotations

import re

from flashtune.core.errors import ProblemError, quoted
from flashtune.core.expressions.nodes import Functions, Node, Op, Table, TableDtype

# An operation, its value and its operands, as in `load@0/3`.
_NODE = re.compile(r"([a-z_]+)(?:@(-?[0-9]{1,10}))?((?:/[0-9]{1,3})*)")
# An element type, a number of dimensions, and `g` if the tensor has a gradient.
_TABLE = re.compile(r"([a-z0-9]+)x([0-9])(g?)")
MAX_TEXT = 2**14


def functions_text(functions: Functions) -> str:
    """Returns functions as text: nodes, the places of the score and the mask, and tables."""
    nodes = ".".join(
        f"{node.op}{f'@{node.value}' if node.value else ''}{''.join(f'/{place}' for place in node.operands)}"
        for node in functions.nodes
    )
    tables = ".".join(
        f"{table.dtype}x{table.dimensions}{'g' * table.has_gradient}" for table in functions.tables
    )
    return f"{nodes}:{functions.score}:{functions.mask}:{tables}"


def parse_functions(text: str) -> Functions:
    """Returns the functions of a text, or raises a `ProblemError`."""
    parts = text.split(":")
    if len(text) > MAX_TEXT or len(parts) != 4:
        raise ProblemError(f"functions cannot be {quoted(text)}: pass nodes:score:mask:tables")
    try:
        nodes = tuple(map(_node, parts[0].split(".")))
        tables = tuple(map(_table, parts[3].split("."))) if parts[3] else ()
        return Functions(nodes, _place(parts[1]), _place(parts[2]), tables)
    except ValueError as error:
        raise ProblemError(f"functions cannot be {quoted(text)}: {error}") from error


def _node(text: str) -> Node:
    match = _NODE.fullmatch(text)
    if match is None:
        raise ValueError(f"{quoted(text)} is no operation")
    operands = tuple(int(place) for place in match[3].split("/")[1:])
    return Node(Op(match[1]), operands, int(match[2] or 0))


def _table(text: str) -> Table:
    match = _TABLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{quoted(text)} is no captured tensor")
    return Table(TableDtype(match[1]), int(match[2]), bool(match[3]))


def _place(text: str) -> int:
    if not re.fullmatch(r"-1|[0-9]{1,3}", text):
        raise ValueError(f"{quoted(text)} is no place of an operation")
    return int(text)
