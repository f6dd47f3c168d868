"""The values of score and mask functions in torch, and bounds of their rounding errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.expressions.nodes import Expressions, Kind, Node, Op, float_of, needed_by


def _minimum(first: Tensor, other: Tensor) -> Tensor:
    """Returns the smaller operand, with the derivative of `clamp` if one operand requires grad."""
    if first.requires_grad and other.requires_grad:
        return torch.minimum(first, other)
    return first.clamp(max=other) if first.requires_grad else other.clamp(max=first)


def _maximum(first: Tensor, other: Tensor) -> Tensor:
    """Returns the larger operand, with the derivative of `clamp` if one operand requires grad."""
    return -_minimum(-first, -other)


# Other operations have the name of torch's function.
_FUNCTIONS: Mapping[Op, Callable[..., Tensor]] = {
    Op.NEGATE: torch.neg,
    Op.NOT: torch.logical_not,
    Op.MINIMUM: _minimum,
    Op.MAXIMUM: _maximum,
    Op.EQUAL: torch.eq,
    Op.AND: torch.bitwise_and,
    Op.OR: torch.bitwise_or,
    Op.XOR: torch.bitwise_xor,
    Op.SHIFT_LEFT: torch.bitwise_left_shift,
    Op.SHIFT_RIGHT: torch.bitwise_right_shift,
}
# Bounds of the derivatives of functions of one operand, from the operand and the result.
_SLOPES: Mapping[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.TANH: lambda operand, result: 1 - result * result,
    Op.SIN: lambda operand, result: torch.ones_like(operand),
    Op.COS: lambda operand, result: torch.ones_like(operand),
    Op.SQRT: lambda operand, result: 0.5 / result,
    Op.ERF: lambda operand, result: 2 / math.pi**0.5 * torch.exp(-operand * operand),
}
# The largest relative error of a float32 rounding.
ROUNDOFF = 2.0**-24


class Values(NamedTuple):
    """The values on which functions depend. Places broadcast with the scores, in int64."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    ints: Tensor  # The captured ints, [n].
    floats: Tensor  # The captured floats, [n].
    tables: tuple[Tensor, ...]  # The captured tensors.
    score: Tensor | None = None  # The scores. Floats are computed in their type.
    of_places: torch.dtype = torch.float64  # The type of floats without scores.

    @property
    def dtype(self) -> torch.dtype:
        """The type of floats: that of the scores, or `of_places`."""
        return self.of_places if self.score is None else self.score.dtype


def evaluate(functions: Expressions, values: Values, result: int) -> Tensor:
    """Returns the value of a node of functions, which broadcasts with the scores.

    An index of a captured tensor that is negative counts from the end, and one out of range reads the nearest
    element.
    """
    return node_values(functions, values, result)[result]


def node_values(functions: Expressions, values: Values, *wanted: int) -> dict[int, Tensor]:
    """Returns the values of nodes and of those that they depend on, operands first.

    Floats of `functions.compared` are compared in float32, which is torch's type for floats from places.
    """
    needed = needed_by(functions.nodes, -1, *wanted)
    compared: dict[int, Tensor] = {}
    exact = functions.compared.intersection(needed)
    if exact and values.dtype is torch.float64:
        compared = node_values(functions, values._replace(score=None, of_places=torch.float32), *exact)
    results: dict[int, Tensor] = {}
    for place in needed:
        node = functions.nodes[place]
        known = compared if compared and place in functions.steps[1] else results
        results[place] = _value(functions, node, values, [known[operand] for operand in node.operands])
    return results


def error_terms(functions: Expressions, values: Values, result: int) -> Tensor:
    """Returns bounds of the rounding errors of a float node in float32, in roundoffs of 1.

    An operation rounds its result, and enlarges the errors of its operands. The score itself has an error of
    its magnitude, so that functions with a derivative above 1 enlarge it.
    """
    assert values.score is not None
    return _errors(functions, values, node_values(functions, values, result), values.score.abs())[result]


def near_steps(functions: Expressions, values: Values, bound: Tensor) -> Tensor | None:
    """Returns whether rounding errors may change a comparison that depends on the score, or an int from it.

    Args:
        functions: The functions.
        values: Their values.
        bound: Bounds of the scores' errors in float32, in roundoffs of 1.

    Returns:
        Bools that broadcast with the scores, or None if there are no such operations.
    """
    near: Tensor | None = None
    results = node_values(functions, values, *functions.steps[0])
    errors = _errors(functions, values, results, bound)
    for place in functions.steps[0]:
        node = functions.nodes[place]
        first, *others = (results[operand] for operand in node.operands)
        limit = others[0] if others else first.round()
        error = sum(errors[operand] for operand in node.operands)
        here = (first - limit).abs() < ROUNDOFF * error
        near = here if near is None else near | here
    return near


def _errors(
    functions: Expressions, values: Values, results: dict[int, Tensor], of_score: Tensor
) -> dict[int, Tensor]:
    """Returns bounds of the rounding errors of nodes with these results, in roundoffs of 1."""
    errors = dict.fromkeys(results, torch.zeros((), dtype=values.dtype, device=values.key.device))
    for place, value in results.items():
        if functions.kinds[place] is Kind.FLOAT:
            node = functions.nodes[place]
            operands, own = ([known[operand] for operand in node.operands] for known in (results, errors))
            error = of_score if node.op is Op.SCORE else _error(node, value, operands, own)
            # An infinite result has no error, and that of its operands may be infinite.
            errors[place] = torch.where(value.isinf(), 0.0, error)
    return errors


def _value(functions: Expressions, node: Node, values: Values, operands: list[Any]) -> Tensor:
    device = values.key.device
    match node.op:
        case Op.SCORE:
            assert values.score is not None
            return values.score
        case Op.BATCH | Op.HEAD | Op.QUERY | Op.KEY:
            place: Tensor = getattr(values, node.op)
            return place
        case Op.BOOL | Op.INT:
            dtype = torch.bool if node.op is Op.BOOL else torch.int64
            return torch.tensor(node.value, dtype=dtype, device=device)
        case Op.FLOAT:
            return torch.tensor(float_of(node.value), dtype=values.dtype, device=device)
        case Op.INT_NUMBER:
            return values.ints[node.value].long()
        case Op.FLOAT_NUMBER:
            return values.floats[node.value].to(values.dtype)
        case Op.LOAD:
            kind = functions.tables[node.value].dtype.kind
            dtype = {Kind.BOOL: torch.bool, Kind.INT: torch.int64, Kind.FLOAT: values.dtype}[kind]
            table = values.tables[node.value]
            # Converted first if autograd sums gradients, so that it does so in the type of the scores.
            table = table.to(dtype) if table.requires_grad else table
            return _loaded(table, operands).to(dtype)
        case Op.TO_FLOAT:
            return operands[0].to(values.dtype)  # type: ignore[no-any-return]
        case Op.TO_INT:
            return operands[0].long()  # type: ignore[no-any-return]
    function: Callable[..., Tensor] = _FUNCTIONS.get(node.op) or getattr(torch, node.op)
    return function(*operands)


def _loaded(table: Tensor, indices: list[Tensor]) -> Tensor:
    """Returns elements of a captured tensor."""
    places = [wrapped(index, size) for index, size in zip(indices, table.shape, strict=True)]
    return table[tuple(places)] if places else table


def wrapped(index: Tensor, size: int) -> Tensor:
    """Returns the places in a dimension that an index reads."""
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def _error(node: Node, result: Tensor, operands: list[Tensor], errors: list[Tensor]) -> Tensor:
    """Returns the bound of an operation's error, from those of its operands."""
    size = result.abs()
    if node.op in _SLOPES:
        return _carried(_SLOPES[node.op](operands[0], result), errors[0]) + 2 * size + 1
    match node.op:
        case Op.TO_FLOAT | Op.ADD | Op.SUBTRACT:
            return sum(errors, size)
        case Op.MULTIPLY:
            (first, other), (of_first, of_other) = operands, errors
            return first.abs() * of_other + other.abs() * of_first + size
        case Op.DIVIDE:
            return (errors[0] + size * errors[1]) / operands[1].abs() + 2 * size
        case Op.EXP:
            return _carried(size, errors[0] + operands[0].abs() + 2)
        case Op.LOG:
            return errors[0] / operands[0].abs() + 2 * size + 1
        case Op.NEGATE | Op.ABS:
            return errors[0]
        case Op.MINIMUM | Op.MAXIMUM:
            (first, other), (of_first, of_other) = operands, errors
            selected = torch.where(result == first, of_first, of_other)
            is_clear = (first - other).abs() > ROUNDOFF * (of_first + of_other)
            return torch.where(is_clear, selected, torch.maximum(of_first, of_other))
        case Op.WHERE:
            return torch.where(operands[0], errors[1], errors[2])
    return torch.zeros_like(size)


def _carried(slope: Tensor, error: Tensor) -> Tensor:
    """Returns an error times a slope. It is zero if one of them is, also if the other one is infinite."""
    return torch.where((slope == 0) | (error == 0), 0.0, slope * error)
