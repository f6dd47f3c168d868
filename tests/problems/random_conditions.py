"""Random mask functions of conditions that kernels write as intervals, remainders, quotients or words.

Constants and captured values are near the lengths of sequences, and some are near the ends of int32. Masks of
`random_masks` have any operations, and moderate values.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Functions, Op, Table, TableDtype

BATCH, HEADS = 2, 4
SIZES = (1, 2, 3, 8, 16, 17, 31, 32, 33, 64, 100, 128, 129, 1000)
DIVISORS = (*SIZES, *(-size for size in SIZES), 5, 7, 12, 15, 24, 63, 65, 127, 255, 256, 257, 4096, 5000)
LARGE_DIVISORS = (2**20, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, -(2**30), 1 - 2**31, -(2**31))
NEAR_ENDS = (2**31 - 1, 2**31 - 2, 2**31 - 100, 100 - 2**31, 1 - 2**31, -(2**31))
EXTREMES = (*NEAR_ENDS, 2**30, 2**30 - 1, 2**29 + 1, 2**29, -(2**29), -(2**30))
BELOW, SAME = (Op.LESS, Op.LESS_EQUAL), (Op.EQUAL, Op.NOT_EQUAL)
COMPARISONS = (*BELOW, *SAME)
DIVISIONS = (Op.FLOOR_DIVIDE, Op.REMAINDER)


class MaskCase(NamedTuple):
    """A mask function, and the ints and tensors that it captures."""

    functions: Functions
    ints: list[int]
    tables: list[Tensor]


def mask_case(chance: random.Random, queries: int, keys: int, *, has_extremes: bool = True) -> MaskCase:
    """Returns a mask of some conditions. Without extremes, typical captured values give values of int32."""
    while True:
        drawn = Conditions(chance, queries, keys, has_extremes)
        mask = drawn.mask(chance.randrange(4))
        # Constant masks have no code.
        if drawn.builder.nodes[mask].op is not Op.BOOL:
            functions, captures = drawn.builder.finish(-1, mask)
            ints = [drawn.ints[place] for place in captures.ints]
            return MaskCase(functions, ints, [drawn.tables[place] for place in captures.tables])


class Conditions:
    """Draws conditions of one mask. Methods and attributes are the places of nodes."""

    def __init__(self, chance: random.Random, queries: int, keys: int, has_extremes: bool) -> None:
        self.chance, self.pick, self.keys, self.builder = chance, chance.choice, keys, Builder()
        self.make, self.constant = self.builder.make, self.builder.constant
        self.extremes = chance.choice((0.0, 0.05, 0.4)) if has_extremes else 0.0
        self.ints: list[int] = []
        self.tables: list[Tensor] = []
        self.query, self.key, batch, head = map(self.make, (Op.QUERY, Op.KEY, Op.BATCH, Op.HEAD))
        self.of_query, self.of_key = self.loaded(queries, self.query), self.loaded(keys, self.key)
        numbers = [self.number(self.value()) for _ in range(12)]
        loads = self.loaded(BATCH, batch), self.loaded(HEADS, head), self.loaded(1)
        self.scalars = [*numbers, *loads, batch, head]
        divisors = (*DIVISORS, *LARGE_DIVISORS) if has_extremes else DIVISORS
        self.divisors = [self.number(self.pick((*divisors, chance.randint(1, 300)))) for _ in range(4)]

    def value(self) -> int:
        """Returns an int near the places of keys, or near the ends of int32."""
        if self.chance.random() < self.extremes:
            return self.pick(EXTREMES)
        return self.chance.randint(*self.pick(((-70, 300), (-self.keys - 5, self.keys + 5))))

    def number(self, value: int) -> int:
        """Returns a constant or a captured int."""
        if self.chance.random() < 0.5:
            return self.constant(value)
        self.ints.append(value)
        return self.make(Op.INT_NUMBER, value=len(self.ints) - 1)

    def loaded(self, size: int, *index: int) -> int:
        """Returns an element of a captured tensor of groups, of places, or of any ints."""
        numbers = self.pick((range(4), range(self.keys + 1), [self.value() for _ in range(4)]))
        values = self.chance.choices(numbers, k=size)
        values = self.pick((values, sorted(values)))
        self.tables.append(torch.tensor(values, dtype=torch.int32).view([size] * len(index)))
        self.builder.tables.append(Table(TableDtype.INT32, len(index)))
        return self.make(Op.LOAD, *index, value=len(self.tables) - 1)

    def two(self, ops: tuple[Op, ...], first: int, other: int) -> int:
        """Returns an operation of two operands in any order."""
        return self.make(self.pick(ops), *self.chance.sample((first, other), 2))

    def row(self) -> int:
        query, scalar, factor = self.query, self.pick(self.scalars), self.chance.randint(-4, 4)
        changed = (
            self.make(self.pick(DIVISIONS), query, self.pick(self.divisors)),
            self.make(Op.MULTIPLY, query, self.constant(factor)),
            self.two((Op.MAXIMUM, Op.MINIMUM), query, scalar),
        )
        moved = self.make(Op.ADD, query, scalar)
        return self.pick((query, query, query, moved, self.of_query, self.pick(changed)))

    def column(self) -> int:
        moved = self.two((Op.ADD, Op.SUBTRACT), self.key, self.pick(self.scalars))
        return self.pick((*[self.key] * 5, moved, moved, self.of_key))

    def distance(self) -> int:
        between = self.two((Op.SUBTRACT,), self.row(), self.column())
        moved = self.make(self.pick((Op.ADD, Op.SUBTRACT)), between, self.pick(self.scalars))
        return self.pick((*[between] * 5, moved, moved, self.make(Op.NEGATE, between)))

    def near(self, between: int, limit: int) -> int:
        """Returns whether a distance is below a limit."""
        return self.make(self.pick(BELOW), self.make(Op.ABS, between), limit)

    def condition(self) -> int:
        """Returns a condition of pairs, rows or columns."""
        two, make, row, column = self.two, self.make, self.row(), self.column()
        between, scalar, divisor = self.distance(), self.pick(self.scalars), self.pick(self.divisors)
        other_divisor, zero, rest = self.pick((divisor, *self.divisors)), self.constant(0), Op.REMAINDER
        side, small = self.pick((scalar, row, row)), self.constant(self.chance.randint(-2, 6))
        op, power = self.pick(DIVISIONS), self.constant(2 ** self.chance.randrange(5))
        places = self.pick((self.query, row)), self.pick((self.key, column))
        parts = make(op, places[0], divisor), make(op, places[1], other_divisor)
        period = make(rest, self.pick((self.key, between)), power)
        long_period = make(Op.ADD, period, make(rest, self.key, self.constant(4)))
        scaled = make(Op.MULTIPLY, make(Op.TO_FLOAT, row), self.constant(self.pick((0.5, 1.0, 2.0))))
        width = self.constant(self.pick((0.5, 2.5, 3.0, 40.5, -1.0)))
        draws = (
            lambda: two(BELOW, column, side),
            lambda: two(BELOW, between, scalar),
            lambda: self.near(between, side),
            lambda: self.near(two((Op.SUBTRACT,), *parts), self.pick((scalar, small))),
            lambda: two(BELOW, make(rest, self.key, divisor), side),
            lambda: two(SAME, make(rest, self.key, divisor), side),
            lambda: two(SAME, make(rest, make(Op.ABS, between), divisor), zero),
            lambda: two((Op.LESS, *SAME), make(rest, between, divisor), self.pick((zero, scalar))),
            lambda: two(COMPARISONS, *parts),
            lambda: two(COMPARISONS, self.pick((period, long_period)), side),
            lambda: two(COMPARISONS, period, make(rest, self.query, power)),
            lambda: two(COMPARISONS, self.pick((self.of_query, row)), self.of_key),
            lambda: two(COMPARISONS, self.pick((row, column)), scalar),
            lambda: self.near(make(Op.SUBTRACT, scaled, make(Op.TO_FLOAT, column)), width),
        )
        return self.pick(draws)()

    def mask(self, depth: int) -> int:
        """Returns a condition, or an operation of conditions."""
        if not depth or self.chance.random() < 0.25:
            return self.condition()
        parts = [self.mask(depth - 1) for _ in range(2)]
        match self.pick((Op.WHERE, Op.NOT, *SAME, *[Op.AND, Op.OR] * 4)):
            case Op.WHERE:
                return self.builder.where(self.condition(), *parts)
            case Op.NOT:
                return self.make(Op.NOT, parts[0])
            case op:
                return self.make(op, *parts)
