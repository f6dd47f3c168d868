"""Random score and mask functions. Their values are defined and moderate for all places."""

import random

import torch
from torch import Tensor

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Functions, Kind, Op, Table, TableDtype

PLACES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)
BINARY = (Op.ADD, Op.SUBTRACT, Op.MULTIPLY, Op.DIVIDE, Op.MINIMUM, Op.MAXIMUM)
UNARY = (Op.TANH, Op.NEGATE, Op.ABS, Op.SIN, Op.COS, Op.ERF)
OF_INTS = (Op.FLOOR_DIVIDE, Op.REMAINDER, Op.AND, Op.OR, Op.XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT)
COMPARED = (Op.LESS, Op.LESS_EQUAL, Op.EQUAL, Op.NOT_EQUAL)
# Captured tensors: a number of each head, numbers of each head and index, and one number.
SIZES: tuple[tuple[int, ...], ...] = ((5,), (5, 7), ())
INTS, FLOATS = (4,), (1.5,)
# Seeds of masks that the last bit of a device's function decides: 1 <= erf(3.8), tanh(sin(t)) < t.
UNDECIDED = frozenset({83, 159})
# Integers stay below this bound, so that no product exceeds 32 bits.
LARGEST = 61


def random_functions(seed: int, steps: int = 14) -> tuple[Functions, tuple[int, ...], tuple[int, ...]]:
    """Returns random functions, the places in `INTS` of their captured ints, and those in `SIZES`."""
    chance, builder = random.Random(seed), Builder()
    builder.tables.extend(Table(TableDtype.FP32, len(size)) for size in SIZES)
    made = [builder.make(op) for op in (Op.SCORE, *PLACES, Op.INT_NUMBER, Op.FLOAT_NUMBER)]
    made += [builder.constant(chance.randint(-3, 3)), builder.constant(chance.uniform(-2, 2))]
    made += [builder.make(Op.LOAD, made[2], value=0), builder.make(Op.LOAD, value=2)]
    for _ in range(steps):
        pick = [chance.choice(made[-6:] if chance.random() < 0.6 else made) for _ in range(3)]
        kinds = {builder.kinds[place] for place in pick[:2]}
        kind = chance.randrange(5)
        if kind == 0 and Kind.BOOL not in kinds:
            made.append(arithmetic(builder, chance.choice(BINARY), *pick[:2]))
        elif kind == 1 and Kind.BOOL not in kinds:
            made.append(builder.promoted(chance.choice(COMPARED), *pick[:2]))
        elif kind == 2:
            made.append(builder.where(builder.to_bool(pick[0]), pick[1], pick[2]))
        elif kind == 3 and builder.kinds[pick[0]] is Kind.INT:
            made.append(builder.make(Op.LOAD, made[2], bounded(builder, pick[0], SIZES[1][1]), value=1))
        elif builder.kinds[pick[0]] is Kind.FLOAT:
            made.append(builder.make(chance.choice(UNARY), pick[0]))
        elif kinds == {Kind.INT}:
            divisor = builder.make(Op.MAXIMUM, builder.constant(2), pick[1])
            op = chance.choice(OF_INTS)
            if op in (Op.SHIFT_LEFT, Op.SHIFT_RIGHT):
                divisor = builder.make(Op.MINIMUM, divisor, builder.constant(9))
            # Shifts to the left exceed the bound.
            made.append(bounded(builder, builder.make(op, pick[0], divisor), LARGEST))
    floats = [place for place in made if builder.kinds[place] is Kind.FLOAT]
    score = builder.make(Op.ADD, floats[-1], made[0])
    masks = [place for place in made if builder.kinds[place] is Kind.BOOL and not builder.uses_score(place)]
    functions, captures = builder.finish(score, masks[-1] if masks else -1)
    return functions, captures.ints, captures.tables


def arithmetic(builder: Builder, op: Op, first: int, other: int) -> int:
    """Returns an operation with a defined result. A float result is not much larger than the operands."""
    if op is Op.DIVIDE:
        size = builder.make(Op.ABS, builder.to_float(other))
        return builder.promoted(op, first, builder.make(Op.ADD, size, builder.constant(1.0)))
    result = builder.promoted(op, first, other)
    if builder.kinds[result] is Kind.INT:
        return bounded(builder, result, LARGEST)
    return builder.make(Op.TANH, result) if op is Op.MULTIPLY else result


def bounded(builder: Builder, place: int, size: int) -> int:
    """Returns the remainder of an integer."""
    return builder.make(Op.REMAINDER, place, builder.constant(size))


def random_tables(generator: torch.Generator | None = None) -> list[Tensor]:
    """Returns captured tensors of `SIZES`."""
    return [torch.rand(size, generator=generator) for size in SIZES]
