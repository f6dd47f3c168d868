"""Interval arithmetic over functions: their possible values for ranges of places.

It bounds the indices of captured tensors. Kernels bound mask functions likewise; see `interval_arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flashtune.core.expressions.builder import OF_INTS
from flashtune.core.expressions.nodes import INT32, MAX_SHIFT, Expressions, Kind, Node, Op, float_of


class Interval(NamedTuple):
    """The least and the greatest possible value. Bools are 0 and 1."""

    least: float
    greatest: float

    @property
    def is_single(self) -> bool:
        """Whether there is one possible value."""
        return self.least == self.greatest


_OF_BITS = frozenset({Op.AND, Op.OR, Op.XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT})
UNKNOWN = Interval(-math.inf, math.inf)
EITHER = Interval(0, 1)
_INCREASING: Mapping[Op, Callable[[float], float]] = {
    Op.TANH: math.tanh,
    Op.EXP: lambda number: math.inf if number > 709 else math.exp(number),
    Op.LOG: lambda number: -math.inf if number <= 0 else math.log(number),
    Op.SQRT: lambda number: math.sqrt(max(number, 0)),
    Op.ERF: math.erf,
    Op.TO_INT: lambda number: number if math.isinf(number) else math.trunc(number),
    Op.TO_FLOAT: lambda number: number,
}


def intervals(
    functions: Expressions,
    places: Mapping[Op, Interval],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
) -> list[Interval]:
    """Returns the possible values of each node.

    `places` has those of `batch`, `head`, `query` and `key`. Others, such as elements of captured tensors,
    have any value. Numbers that are not given have any value too.
    """
    numbers = {Op.INT_NUMBER: ints, Op.FLOAT_NUMBER: floats}
    results: list[Interval] = []
    for place, node in enumerate(functions.nodes):
        operands = [results[operand] for operand in node.operands]
        if node.op in places:
            result = places[node.op]
        elif node.op in numbers and node.value < len(numbers[node.op]):
            number = numbers[node.op][node.value]
            result = Interval(number, number)
        else:
            result = _combined(node, operands)
        if math.isnan(result.least) or math.isnan(result.greatest):
            result = UNKNOWN
        results.append(_bounded(result, functions.kinds[place]))
    return results


def _bounded(result: Interval, kind: Kind) -> Interval:
    """Returns an interval of values of a type. Python's ints would grow without limit."""
    if kind is Kind.BOOL:
        return Interval(max(result.least, 0), min(result.greatest, 1))
    if kind is Kind.FLOAT:
        return Interval(float(result.least), float(result.greatest))
    # An int32 that overflows has any value.
    fits = all(math.isinf(bound) or INT32[0] <= bound <= INT32[-1] for bound in result)
    return result if fits else UNKNOWN


def _combined(node: Node, operands: list[Interval]) -> Interval:
    op = node.op
    if op in (Op.BOOL, Op.INT):
        return Interval(node.value, node.value)
    if op is Op.FLOAT:
        return Interval(float_of(node.value), float_of(node.value))
    if not operands or op is Op.LOAD:
        return UNKNOWN
    first, *others = operands
    if op in _INCREASING:
        function = _INCREASING[op]
        return Interval(function(first.least), function(first.greatest))
    match op:
        case Op.NEGATE:
            return Interval(-first.greatest, -first.least)
        case Op.NOT:
            return Interval(1 - first.greatest, 1 - first.least)
        case Op.SIN | Op.COS:
            return Interval(-1, 1)
        case Op.ABS:
            ends = sorted((abs(first.least), abs(first.greatest)))
            return Interval(0 if first.least <= 0 <= first.greatest else ends[0], ends[1])
        case Op.WHERE:
            chosen = others if not first.is_single else others[:1] if first.least else others[1:]
            return Interval(min(own.least for own in chosen), max(own.greatest for own in chosen))
    are_bools = all(own.least >= 0 and own.greatest <= 1 for own in operands)
    if op in _OF_BITS and (op not in (Op.AND, Op.OR) or not are_bools):
        return _of_bits(op, first, others[0])
    return _of_pair(op, first, others[0])


def _of_pair(op: Op, first: Interval, other: Interval) -> Interval:
    match op:
        case Op.ADD:
            return Interval(first.least + other.least, first.greatest + other.greatest)
        case Op.SUBTRACT:
            return Interval(first.least - other.greatest, first.greatest - other.least)
        case Op.MULTIPLY:
            return _corners(first, other, lambda left, right: 0 if 0 in (left, right) else left * right)
        case Op.DIVIDE | Op.FLOOR_DIVIDE if other.least > 0 or other.greatest < 0:
            quotient = _corners(first, other, lambda left, right: left / right)
            return quotient if op is Op.DIVIDE else Interval(*map(_floor, quotient))
        case Op.REMAINDER if other.least > 0:
            if other.is_single and _floor(first.least / other.least) == _floor(first.greatest / other.least):
                return Interval(first.least % other.least, first.greatest % other.least)
            return Interval(0, other.greatest - 1)
        case Op.MINIMUM | Op.AND:
            return Interval(min(first.least, other.least), min(first.greatest, other.greatest))
        case Op.MAXIMUM | Op.OR:
            return Interval(max(first.least, other.least), max(first.greatest, other.greatest))
        case Op.LESS:
            return Interval(first.greatest < other.least, first.least < other.greatest)
        case Op.LESS_EQUAL:
            return Interval(first.greatest <= other.least, first.least <= other.greatest)
        case Op.EQUAL:
            same = first.is_single and first == other
            return Interval(same, first.least <= other.greatest and other.least <= first.greatest)
        case Op.NOT_EQUAL:
            equal = _of_pair(Op.EQUAL, first, other)
            return Interval(1 - equal.greatest, 1 - equal.least)
    return UNKNOWN


def _of_bits(op: Op, first: Interval, other: Interval) -> Interval:
    """Returns the possible values of an operation of the bits of ints."""
    if op in (Op.SHIFT_LEFT, Op.SHIFT_RIGHT):
        # Decoded functions may have any count.
        if not other.is_single or not 0 <= other.least <= MAX_SHIFT:
            return UNKNOWN
        factor = 2**other.least if op is Op.SHIFT_LEFT else 2**-other.least
        shifted = Interval(_floor(first.least * factor), _floor(first.greatest * factor))
        return shifted if shifted.least >= INT32[0] and shifted.greatest <= INT32[-1] else UNKNOWN
    if min(first.least, other.least) < 0 or math.isinf(max(first.greatest, other.greatest)):
        return UNKNOWN
    if first.is_single and other.is_single:
        value = OF_INTS[op](int(first.least), int(other.least))
        return Interval(value, value)
    if op is Op.AND:
        return Interval(0, min(first.greatest, other.greatest))
    ones = 2 ** int(max(first.greatest, other.greatest)).bit_length() - 1
    return Interval(max(first.least, other.least) if op is Op.OR else 0, ones)


def _floor(number: float) -> float:
    return number if math.isinf(number) or math.isnan(number) else math.floor(number)


def _corners(first: Interval, other: Interval, function: Callable[[float, float], float]) -> Interval:
    corners = [function(left, right) for left in first for right in other]
    return UNKNOWN if any(map(math.isnan, corners)) else Interval(min(corners), max(corners))
