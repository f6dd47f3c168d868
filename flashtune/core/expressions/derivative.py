"""The derivative of a score function with respect to the score, by rule."""

from __future__ import annotations

import math

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Functions, Kind, Op


def score_derivative(functions: Functions) -> Functions | None:
    """Returns functions that compute the derivative by the score, or None if it is 1.

    Its captured values have the places of those of `functions`, all of which it keeps. At points without a
    derivative, such as a bound of a minimum, it is that of torch: the first operand's, or 0 for `abs` of 0.
    """
    if functions.score < 0:
        return None
    builder = Builder()
    builder.tables.extend(functions.tables)
    places: list[int] = []
    slopes: list[int | None] = []
    for node in functions.nodes:
        operands = [places[operand] for operand in node.operands]
        place = builder.make(node.op, *operands, value=node.value)
        places.append(place)
        steps = [slopes[operand] for operand in node.operands]
        slopes.append(_slope(builder, node.op, place, operands, steps))
    slope = slopes[functions.score]
    result = builder.constant(0.0) if slope is None else slope
    if builder.nodes[result].op is Op.FLOAT and result == builder.constant(1.0):
        return None
    # The places of captured values stay, so that the inputs of the call serve both.
    used = sorted(_reached(builder, result))
    order = {place: index for index, place in enumerate(used)}
    nodes = tuple(
        type(node)(node.op, tuple(order[operand] for operand in node.operands), node.value)
        for node in (builder.nodes[place] for place in used)
    )
    return Functions(nodes, order[result], -1, functions.tables)


def _reached(builder: Builder, root: int) -> set[int]:
    reached = {root}
    for place in range(root, -1, -1):
        if place in reached:
            reached.update(builder.nodes[place].operands)
    return reached


def _slope(builder: Builder, op: Op, place: int, operands: list[int], steps: list[int | None]) -> int | None:
    """Returns the derivative of a node, None if it is zero. `steps` are those of its operands."""
    if op is Op.SCORE:
        return builder.constant(1.0)
    if builder.kinds[place] is not Kind.FLOAT or all(step is None for step in steps):
        return None
    if len(operands) == 1:
        return _product(builder, steps[0], _factor(builder, op, place, operands[0]))
    if op is Op.WHERE:
        return _chosen(builder, operands[0], steps[1], steps[2])
    (first, other), (of_first, of_other) = operands, steps
    match op:
        case Op.ADD:
            return _sum(builder, of_first, of_other)
        case Op.SUBTRACT:
            return _difference(builder, of_first, of_other)
        case Op.MULTIPLY:
            return _sum(builder, _product(builder, of_first, other), _product(builder, of_other, first))
        case Op.DIVIDE:
            moved = _difference(builder, of_first, _product(builder, of_other, place))
            return None if moved is None else builder.make(Op.DIVIDE, moved, other)
        case Op.MINIMUM | Op.MAXIMUM:
            pair = (first, other) if op is Op.MINIMUM else (other, first)
            return _chosen(builder, builder.make(Op.LESS_EQUAL, *pair), of_first, of_other)
    raise AssertionError(f"{op} has no derivative")


def _factor(builder: Builder, op: Op, place: int, operand: int) -> int:
    """Returns the derivative of a function of one operand by the operand."""
    make, one = builder.make, builder.constant(1.0)
    match op:
        case Op.NEGATE:
            return builder.constant(-1.0)
        case Op.TANH:
            return make(Op.SUBTRACT, one, make(Op.MULTIPLY, place, place))
        case Op.EXP:
            return place
        case Op.LOG:
            return make(Op.DIVIDE, one, operand)
        case Op.SIN:
            return make(Op.COS, operand)
        case Op.COS:
            return make(Op.NEGATE, make(Op.SIN, operand))
        case Op.SQRT:
            return make(Op.DIVIDE, builder.constant(0.5), place)
        case Op.ERF:
            falling = make(Op.EXP, make(Op.NEGATE, make(Op.MULTIPLY, operand, operand)))
            return make(Op.MULTIPLY, builder.constant(2 / math.pi**0.5), falling)
        case Op.ABS:
            zero = builder.constant(0.0)
            negative = make(Op.WHERE, make(Op.LESS, operand, zero), builder.constant(-1.0), zero)
            return make(Op.WHERE, make(Op.LESS, zero, operand), one, negative)
    raise AssertionError(f"{op} has no derivative")


def _product(builder: Builder, first: int | None, other: int | None) -> int | None:
    return None if first is None or other is None else builder.make(Op.MULTIPLY, first, other)


def _sum(builder: Builder, first: int | None, other: int | None) -> int | None:
    if first is None or other is None:
        return other if first is None else first
    return builder.make(Op.ADD, first, other)


def _difference(builder: Builder, first: int | None, other: int | None) -> int | None:
    if first is None or other is None:
        return first if other is None else builder.make(Op.NEGATE, other)
    return builder.make(Op.SUBTRACT, first, other)


def _chosen(builder: Builder, condition: int, first: int | None, other: int | None) -> int:
    zero = builder.constant(0.0)
    return builder.make(Op.WHERE, condition, *(zero if part is None else part for part in (first, other)))
