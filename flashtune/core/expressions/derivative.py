"""The derivatives of a score function with respect to the score and to captured tensors, by rule."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Expressions, Functions, Kind, Node, Op, needed_by

# Functions of which derivatives are kept.
MAX_KEPT = 256
# Limits of operations and chains of derivatives, which no function within its own limits reaches.
MAX_DERIVED, MAX_DERIVED_DEPTH = 2**14, 2**10


class Element(NamedTuple):
    """An element of a captured tensor that has a gradient."""

    load: int  # The place of the load.
    slope: int  # The place of the derivative of the changed score by the element.


class Derivatives(Expressions, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Functions and derivatives of their score. Captured values have the places of those of the functions.

    Attributes:
        slope: The place of the derivative of the changed score by the score, or -1 if it is 1.
        elements: The loads of captured tensors with gradients on which the changed score depends.
    """

    slope: int = -1
    elements: tuple[Element, ...] = ()


def is_of_rows(functions: Expressions, element: Element) -> bool:
    """Returns whether the index of a load depends on neither the key nor the score."""
    used = {functions.nodes[place].op for place in functions.needed(element.load)}
    return not used & {Op.KEY, Op.SCORE}


@functools.lru_cache(MAX_KEPT)
def derivatives(functions: Functions) -> Derivatives:
    """Returns functions with derivatives of the score by the score and by elements of captured tensors.

    The derivative of `abs` at 0 is 0. A minimum or a maximum at a bound without a derivative has that of the
    other operand, like torch's `clamp`. If equal operands both have one, it has that of one of them.
    """
    builder = Builder(MAX_DERIVED, MAX_DERIVED_DEPTH)
    builder.tables.extend(functions.tables)
    places: list[int] = []
    varying: set[int] = set()
    for node in functions.nodes:
        operands = [places[operand] for operand in node.operands]
        places.append(builder.make(node.op, *operands, value=node.value))
        has_gradient = node.op is Op.LOAD and functions.tables[node.value].has_gradient
        if node.op is Op.SCORE or has_gradient or not varying.isdisjoint(operands):
            varying.add(places[-1])
    score, mask = (-1 if root < 0 else places[root] for root in (functions.score, functions.mask))
    slope, elements = -1, []
    if score >= 0:
        own = _derivative(builder, functions, places, varying, Node(Op.SCORE))
        slope = builder.constant(0.0) if own is None else own
        slope = -1 if slope == builder.constant(1.0) else slope
        for node in dict.fromkeys(functions.nodes):
            if node.op is Op.LOAD and functions.tables[node.value].has_gradient:
                own = _derivative(builder, functions, places, varying, node)
                if own is not None:
                    elements.append(Element(places[functions.nodes.index(node)], own))
    used = needed_by(builder.nodes, score, mask, slope, *itertools.chain(*elements))
    order = {place: index for index, place in enumerate(used)} | {-1: -1}
    return Derivatives(
        tuple(
            Node(node.op, tuple(order[operand] for operand in node.operands), node.value)
            for node in (builder.nodes[place] for place in used)
        ),
        order[score],
        order[mask],
        functions.tables,
        order[slope],
        tuple(Element(order[load], order[own]) for load, own in elements),
    )


def _derivative(
    builder: Builder, functions: Functions, places: list[int], varying: set[int], variable: Node
) -> int | None:
    """Returns the derivative of the score by a node of functions, None if it is zero.

    `varying` has the places of nodes that depend on a value with a gradient.
    """
    slopes: list[int | None] = []
    for node, place in zip(functions.nodes, places, strict=True):
        operands = [places[operand] for operand in node.operands]
        steps = [slopes[operand] for operand in node.operands]
        if node.op in (Op.MINIMUM, Op.MAXIMUM) and operands[0] not in varying:
            # At equality, the derivative is that of the first operand.
            operands.reverse()
            steps.reverse()
        is_variable = node == variable
        slopes.append(
            builder.constant(1.0) if is_variable else _slope(builder, node.op, place, operands, steps)
        )
    return slopes[functions.score]


def _slope(builder: Builder, op: Op, place: int, operands: list[int], steps: list[int | None]) -> int | None:
    """Returns the derivative of a node, None if it is zero. `steps` are those of its operands."""
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
