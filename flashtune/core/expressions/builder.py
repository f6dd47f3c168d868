"""`Builder`: makes nodes in canonical form. Functions with equal canonical forms share a kernel.

Nodes with the same operation and operands are one node. Operands that commute have an order that does not
depend on the names of captured values. Sums, products and logical terms of ints and bools are flat lists in
this order. Constants are folded where the result is exact.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import (
    INT32,
    MAX_DEPTH,
    MAX_NODES,
    MAX_SHIFT,
    MINUS_INFINITY,
    NUMBERS,
    RULES,
    Functions,
    Kind,
    Node,
    Op,
    Table,
    float_bits,
    float_of,
    kind_of,
)

# Nodes that are made include those that simplification leaves unused.
MAX_BUILT = 4 * MAX_NODES
_ASSOCIATIVE = frozenset({Op.ADD, Op.MULTIPLY, Op.MINIMUM, Op.MAXIMUM, Op.AND, Op.OR})
OF_INTS: Mapping[Op, Callable[..., int]] = {
    Op.NEGATE: operator.neg,
    Op.ABS: abs,
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.MINIMUM: min,
    Op.MAXIMUM: max,
    Op.LESS: operator.lt,
    Op.LESS_EQUAL: operator.le,
    Op.EQUAL: operator.eq,
    Op.NOT_EQUAL: operator.ne,
    Op.AND: operator.and_,
    Op.OR: operator.or_,
    Op.XOR: operator.xor,
    Op.SHIFT_LEFT: operator.lshift,
    Op.SHIFT_RIGHT: operator.rshift,
    Op.NOT: operator.not_,
    Op.TO_INT: int,
}
_OF_DIVISORS: Mapping[Op, Callable[[int, int], int]] = {
    Op.FLOOR_DIVIDE: operator.floordiv,
    Op.REMAINDER: operator.mod,
}


class Captures(NamedTuple):
    """The places, in the builder, of the captured values of `Functions`, in their order."""

    tables: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[int, ...]
    # Whether the mask hides keys that the score function gives a score of minus infinity.
    hides_scores: bool


class Builder:
    """Nodes that are made one by one. Methods return the place of a node."""

    def __init__(self, max_built: int = MAX_BUILT, max_depth: int = MAX_DEPTH) -> None:
        self._max_built, self._max_depth = max_built, max_depth
        self.nodes: list[Node] = []
        self.kinds: list[Kind] = []
        self.tables: list[Table] = []
        self._places: dict[Node, int] = {}
        # A hash of each node without the names of captured values, for the order of operands.
        self._shapes: list[bytes] = []
        self._uses_score: list[bool] = []
        self._depths: list[int] = []
        self._splits: dict[int, tuple[int, int]] = {}

    def constant(self, value: float) -> int:
        """Returns a constant bool, int or float."""
        if isinstance(value, bool):
            return self._node(Op.BOOL, value=int(value))
        if isinstance(value, int) and value in INT32:
            return self._node(Op.INT, value=value)
        return self._node(Op.FLOAT, value=float_bits(float(value)))

    def make(self, op: Op, *operands: int, value: int = 0) -> int:
        """Returns the canonical node of an operation. Operands have the types of its rule."""
        kind_of(Node(op, operands, value), [self.kinds[place] for place in operands], self.tables)
        folded = self._folded(op, operands)
        if folded is not None:
            return folded
        simpler = self._simplified(op, operands)
        if simpler is not None:
            return simpler
        if op in _ASSOCIATIVE and self.kinds[operands[0]] is not Kind.FLOAT:
            return self._chain(op, operands)
        if op in RULES and RULES[op].commutes:
            operands = tuple(sorted(operands, key=self._shapes.__getitem__))
        return self._node(op, operands, value)

    def promoted(self, op: Op, *operands: int) -> int:
        """Returns an operation of numbers, or a comparison, after conversions to a common type."""
        kinds = {self.kinds[place] for place in operands}
        if op is Op.DIVIDE or Kind.FLOAT in kinds:
            return self.make(op, *map(self.to_float, operands))
        if kinds == {Kind.BOOL} and Kind.BOOL in RULES[op].kinds:
            return self.make(op, *operands)
        return self.make(op, *map(self.to_int, operands))

    def where(self, condition: int, first: int, other: int) -> int:
        """Returns a choice between values, after conversions to a common type."""
        kinds = {self.kinds[first], self.kinds[other]}
        if Kind.FLOAT in kinds:
            first, other = self.to_float(first), self.to_float(other)
        elif kinds != {Kind.BOOL}:
            first, other = self.to_int(first), self.to_int(other)
        return self.make(Op.WHERE, condition, first, other)

    def to_float(self, place: int) -> int:
        """Returns a value as float32."""
        return place if self.kinds[place] is Kind.FLOAT else self.make(Op.TO_FLOAT, place)

    def to_int(self, place: int) -> int:
        """Returns a value as int32; floats are truncated."""
        return place if self.kinds[place] is Kind.INT else self.make(Op.TO_INT, place)

    def to_bool(self, place: int) -> int:
        """Returns whether a value is not zero."""
        if self.kinds[place] is Kind.BOOL:
            return place
        zero = self.constant(0.0 if self.kinds[place] is Kind.FLOAT else 0)
        return self.make(Op.NOT_EQUAL, place, zero)

    def uses_score(self, place: int) -> bool:
        """Returns whether a node depends on the score."""
        return self._uses_score[place]

    def finish(self, score: int, mask: int) -> tuple[Functions, Captures]:
        """Returns the functions with these results, -1 without one, and their captured values.

        Scores of minus infinity become hidden keys.
        """
        hides_scores = False
        if score >= 0:
            score, visible = self._split(score)
            hides_scores = visible >= 0
            mask = visible if mask < 0 else mask if visible < 0 else self.make(Op.AND, mask, visible)
            score = -1 if self.nodes[score].op is Op.SCORE else score
        if mask >= 0 and self.nodes[mask] == Node(Op.BOOL, (), 1):
            mask = -1
        order: dict[int, int] = {}
        for root in (score, mask):
            if root >= 0:
                self._visit(root, order)
        captured: dict[Op, dict[int, int]] = {op: {} for op in (Op.LOAD, *NUMBERS)}
        nodes = []
        for place in order:
            node = self.nodes[place]
            value = node.value
            if node.op in captured:
                value = captured[node.op].setdefault(value, len(captured[node.op]))
            nodes.append(Node(node.op, tuple(order[operand] for operand in node.operands), value))
        tables, ints, floats = (tuple(captured[op]) for op in (Op.LOAD, *NUMBERS))
        kinds = tuple(self.tables[place] for place in tables)
        functions = Functions(tuple(nodes), order.get(score, -1), order.get(mask, -1), kinds)
        return functions, Captures(tables, ints, floats, hides_scores)

    def _visit(self, root: int, order: dict[int, int]) -> None:
        """Adds a node and its operands to an order, operands first. Without recursion: chains are long."""
        pending = [(root, False)]
        while pending:
            place, is_ready = pending.pop()
            if place in order:
                continue
            if is_ready:
                order[place] = len(order)
                continue
            pending.append((place, True))
            pending.extend((operand, False) for operand in reversed(self.nodes[place].operands))

    def _node(self, op: Op, operands: tuple[int, ...] = (), value: int = 0) -> int:
        node = Node(op, operands, value)
        known = self._places.get(node)
        if known is not None:
            return known
        depth = 1 + max((self._depths[place] for place in operands), default=0)
        if len(self.nodes) >= self._max_built or depth > self._max_depth:
            raise ProblemError(
                f"score and mask functions have over {MAX_NODES} operations, or {MAX_DEPTH} of them in a "
                "chain: shorten them"
            )
        kinds = [self.kinds[place] for place in operands]
        self.kinds.append(kind_of(node, kinds, self.tables))
        self._depths.append(depth)
        named = "" if op in NUMBERS else self.tables[value] if op is Op.LOAD else value
        shapes = b"".join(self._shapes[place] for place in operands)
        self._shapes.append(hashlib.sha256(f"{op} {named!r} ".encode() + shapes).digest())
        self._uses_score.append(op is Op.SCORE or any(self._uses_score[place] for place in operands))
        self._places[node] = len(self.nodes)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _chain(self, op: Op, operands: tuple[int, ...]) -> int:
        """Returns an associative operation of the operands of its operands, in canonical order."""
        terms: list[int] = []
        pending = list(reversed(operands))
        while pending:
            place = pending.pop()
            node = self.nodes[place]
            if node.op is op:
                pending.extend(reversed(node.operands))
            elif op in (Op.ADD, Op.MULTIPLY) or place not in terms:
                terms.append(place)
            if len(terms) > MAX_DEPTH:
                raise ProblemError(f"a score or mask function has over {MAX_DEPTH} terms: shorten it")
        constants = [place for place in terms if self.nodes[place].op is Op.INT]
        if len(constants) > 1:
            terms = [place for place in terms if place not in constants]
            combined = constants[0]
            for place in constants[1:]:
                folded = self._folded(op, (combined, place))
                assert folded is not None
                combined = folded
            # The rest of the terms and the combined constant may be simpler again.
            return self.make(op, self._chain(op, tuple(terms)), combined) if terms else combined
        terms.sort(key=self._shapes.__getitem__)
        result = terms[0]
        for place in terms[1:]:
            result = self._node(op, (result, place))
        return result

    def _constant_of(self, place: int) -> int | float | None:
        node = self.nodes[place]
        if node.op is Op.FLOAT:
            return float_of(node.value)
        return node.value if node.op in (Op.BOOL, Op.INT) else None

    def _folded(self, op: Op, operands: tuple[int, ...]) -> int | None:
        """Returns the constant result of constant operands if it is exact."""
        values = [self._constant_of(place) for place in operands]
        if not values or None in values:
            return None
        kinds = {self.kinds[place] for place in operands}
        if op is Op.TO_FLOAT:
            return self.constant(float(values[0] or 0))
        if op is Op.NEGATE and kinds == {Kind.FLOAT}:
            return self.constant(-float(values[0] or 0))
        if op is Op.TO_INT and not math.isfinite(values[0] or 0):
            return None
        # Decoded functions may have any count.
        if op in (Op.SHIFT_LEFT, Op.SHIFT_RIGHT) and not 0 <= (values[1] or 0) <= MAX_SHIFT:
            return None
        if op in _OF_DIVISORS and values[1]:
            result = _OF_DIVISORS[op](*values)  # type: ignore[arg-type]
        elif op in OF_INTS and (Kind.FLOAT not in kinds or op is Op.TO_INT):
            result = OF_INTS[op](*values)
        else:
            return None
        of_bools = (RULES[op].result or self.kinds[operands[0]]) is Kind.BOOL
        return self.constant(bool(result)) if of_bools else self.constant(result) if result in INT32 else None

    def _simplified(self, op: Op, operands: tuple[int, ...]) -> int | None:
        """Returns an equal node that is simpler, or None."""
        if op is Op.WHERE:
            return self._simplified_where(*operands)
        if op in (Op.AND, Op.OR):
            for place, other in (operands, operands[::-1]):
                if self.nodes[place].op is Op.BOOL:
                    return other if self.nodes[place].value == (op is Op.AND) else place
            return operands[0] if operands[0] == operands[1] else None
        if op is Op.NOT:
            return self._simplified_not(operands[0])
        if op is Op.NEGATE and self.nodes[operands[0]].op is Op.NEGATE:
            return self.nodes[operands[0]].operands[0]
        if len(operands) != 2 or op is Op.LOAD:
            return None
        if RULES[op].result is Kind.BOOL:
            return self._simplified_comparison(op, *operands)
        return self._simplified_arithmetic(op, *operands)

    def _simplified_where(self, condition: int, first: int, other: int) -> int | None:
        node = self.nodes[condition]
        if node.op is Op.BOOL:
            return first if node.value else other
        if first == other:
            return first
        return self.make(Op.WHERE, node.operands[0], other, first) if node.op is Op.NOT else None

    def _simplified_not(self, place: int) -> int | None:
        node = self.nodes[place]
        if node.op is Op.NOT:
            return node.operands[0]
        opposite = {Op.EQUAL: Op.NOT_EQUAL, Op.NOT_EQUAL: Op.EQUAL}.get(node.op)
        if opposite is not None:
            return self.make(opposite, *node.operands)
        # Of floats, neither a comparison nor its opposite is true with NaN.
        if node.op in (Op.LESS, Op.LESS_EQUAL) and self.kinds[node.operands[0]] is not Kind.FLOAT:
            op = Op.LESS_EQUAL if node.op is Op.LESS else Op.LESS
            return self.make(op, *reversed(node.operands))
        return None

    def _simplified_comparison(self, op: Op, first: int, other: int) -> int | None:
        if self.kinds[first] is not Kind.INT:
            return None
        left, right = self.nodes[first], self.nodes[other]
        # Of a difference and zero, its terms are compared.
        if right == Node(Op.INT) and left.op is Op.SUBTRACT:
            return self.make(op, *left.operands)
        if left == Node(Op.INT) and right.op is Op.SUBTRACT:
            return self.make(op, *reversed(right.operands))
        if op is Op.LESS and right.op is Op.INT and right.value - 1 in INT32:
            return self.make(Op.LESS_EQUAL, first, self.constant(right.value - 1))
        if op is Op.LESS and left.op is Op.INT and left.value + 1 in INT32:
            return self.make(Op.LESS_EQUAL, self.constant(left.value + 1), other)
        return None

    def _simplified_arithmetic(self, op: Op, first: int, other: int) -> int | None:
        left, right = self._constant_of(first), self._constant_of(other)
        if op is Op.ADD:
            if left == 0 or right == 0:
                return other if left == 0 else first
            for place, negated in ((first, other), (other, first)):
                if self.nodes[negated].op is Op.NEGATE:
                    return self.make(Op.SUBTRACT, place, self.nodes[negated].operands[0])
        if op is Op.MULTIPLY and (left == 1 or right == 1):
            return other if left == 1 else first
        if op in (Op.DIVIDE, Op.FLOOR_DIVIDE) and right == 1:
            return first
        if op is Op.SUBTRACT:
            if right == 0:
                return first
            if right is not None and self.kinds[first] is Kind.INT and -right in INT32:
                return self.make(Op.ADD, first, self.constant(-right))
            if self.nodes[other].op is Op.NEGATE:
                return self.make(Op.ADD, first, self.nodes[other].operands[0])
        return None

    def _split(self, place: int) -> tuple[int, int]:
        """Returns a score without terms of minus infinity, and where these do not hide it, or -1."""
        if place not in self._splits:
            self._splits[place] = self._split_node(place)
        return self._splits[place]

    def _split_node(self, place: int) -> tuple[int, int]:
        node = self.nodes[place]
        if node == MINUS_INFINITY:
            return self.constant(0.0), self.constant(False)
        if node.op is Op.WHERE and not self.uses_score(node.operands[0]):
            condition, first, other = node.operands
            (first, shown), (other, otherwise) = self._split(first), self._split(other)
            if shown < 0 and otherwise < 0:
                return place, -1
            shown, otherwise = (self.constant(True) if part < 0 else part for part in (shown, otherwise))
            visible = self.make(
                Op.OR,
                self.make(Op.AND, condition, shown),
                self.make(Op.AND, self.make(Op.NOT, condition), otherwise),
            )
            # The score of a hidden key has no effect.
            if self.nodes[otherwise] == Node(Op.BOOL):
                return first, visible
            if self.nodes[shown] == Node(Op.BOOL):
                return other, visible
            return self.make(Op.WHERE, condition, first, other), visible
        if node.op in (Op.ADD, Op.SUBTRACT):
            first, visible = self._split(node.operands[0])
            other, too = self._split(node.operands[1]) if node.op is Op.ADD else (node.operands[1], -1)
            if visible < 0 and too < 0:
                return place, -1
            both = too if visible < 0 else visible if too < 0 else self.make(Op.AND, visible, too)
            return self.make(node.op, first, other), both
        return place, -1
