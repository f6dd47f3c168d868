"""Operands of traced operations: constants, captured tensors with some of their indices, and rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import INT32, Op

# A row of a captured tensor is computed element by element.
MAX_ROW = 128


class Unsupported(Exception):  # noqa: N818 - becomes an error with the function and the line
    """An operation is not in the list, with its reason as the end of a sentence."""


@dataclass(frozen=True)
class Partial:
    """A captured tensor with the first of its indices."""

    table: int
    sizes: tuple[int, ...]
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A number of the program text or a number that decided its control flow."""

    value: float


class Row(tuple[int, ...]):
    """The elements of a dimension of a captured tensor, or results of them, as places in the builder."""

    __slots__ = ()


def row_of(builder: Builder, operand: Any) -> Row | None:
    """Returns a row, or a captured tensor that lacks its last index as a row. Other operands give None."""
    if isinstance(operand, Row):
        return operand
    if not isinstance(operand, Partial) or len(operand.sizes) != len(operand.indices) + 1:
        return None
    if operand.sizes[-1] not in range(1, MAX_ROW + 1):
        return None
    return Row(
        builder.make(Op.LOAD, *operand.indices, builder.constant(index), value=operand.table)
        for index in range(operand.sizes[-1])
    )


def combined(builder: Builder, op: Op, places: Iterable[int]) -> int:
    """Returns the sum, or the result of another operation of pairs, of some values."""
    terms = list(places)
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [builder.promoted(op, *pair) for pair in pairs] + (terms[-1:] if len(terms) % 2 else [])
    return terms[0]


def place_of(builder: Builder, operand: Any) -> int:
    """Returns an operand as a place in the builder."""
    if type(operand) is int:
        return operand
    if isinstance(operand, Constant):
        if type(operand.value) is int and operand.value not in INT32:
            raise Unsupported(f"{operand.value} is no integer of 32 bits")
        return builder.constant(operand.value)
    if isinstance(operand, Row):
        raise Unsupported(f"it is a row of {len(operand)} elements: index or sum it")
    if isinstance(operand, Partial):
        missing = len(operand.sizes) - len(operand.indices)
        if missing:
            raise Unsupported(f"a captured tensor lacks {missing} of its indices: index each dimension")
        return builder.make(Op.LOAD, *operand.indices, value=operand.table)
    raise Unsupported(f"an operand is {type(operand).__name__}")
