"""Random mask functions over positions, numbers and captured tensors, of which some have NaN and infinity."""

import random

import torch
from torch import Tensor

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Functions, Kind, Op, Table, TableDtype

BATCH, HEADS, QUERIES, KEYS = 2, 3, 38, 45
INTS, FLOATS = (7, 20), (1.5, -0.25)
PLACES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)
_OF_INTS = (
    *(Op.ADD, Op.SUBTRACT, Op.SUBTRACT, Op.MULTIPLY, Op.FLOOR_DIVIDE, Op.REMAINDER, Op.MINIMUM),
    *(Op.MAXIMUM, Op.AND, Op.OR, Op.XOR, Op.SHIFT_LEFT, Op.SHIFT_RIGHT, Op.ABS, Op.NEGATE, Op.TO_FLOAT),
)
_OF_FLOATS = (
    *(Op.ADD, Op.SUBTRACT, Op.MULTIPLY, Op.DIVIDE, Op.MINIMUM, Op.MAXIMUM, Op.NEGATE, Op.ABS, Op.TANH),
    *(Op.EXP, Op.LOG, Op.SIN, Op.COS, Op.SQRT, Op.ERF),
)
_OF_BOOLS = (Op.AND, Op.OR, Op.EQUAL, Op.NOT_EQUAL, Op.NOT, Op.TO_INT, Op.TO_FLOAT)
_COMPARED = (Op.LESS, Op.LESS_EQUAL, Op.LESS, Op.LESS_EQUAL, Op.EQUAL, Op.NOT_EQUAL)


def captured_tables() -> list[tuple[TableDtype, Tensor]]:
    """Captured tensors: documents, starts, numbers, bools and numbers of heads."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(BATCH, KEYS, generator=generator).sort(-1).values
    numbers[0, 5], numbers[1, 40] = torch.nan, torch.inf
    return [
        (TableDtype.INT64, torch.arange(KEYS) // 9),
        (TableDtype.INT32, torch.tensor([3, -1, 12, 20, 33, 44], dtype=torch.int32)),
        (TableDtype.FP32, numbers),
        (TableDtype.BOOL, torch.arange(HEADS * KEYS).view(HEADS, KEYS) // 20 % 2 == 0),
        (TableDtype.BF16, torch.tensor([0.5, -1.0, 8.0], dtype=torch.bfloat16)),
    ]


def random_mask(seed: int, steps: int = 16) -> tuple[Functions, tuple[int, ...], tuple[Tensor, ...]]:
    """A mask function of random operations, the captured ints, and the captured tensors."""
    chance, builder = random.Random(seed), Builder()
    tables = captured_tables()
    builder.tables.extend(Table(dtype, tensor.dim()) for dtype, tensor in tables)
    batch, head, query, key = (builder.make(op) for op in PLACES)
    made = [query, key, head, query, key, batch]
    made += [builder.make(Op.INT_NUMBER, value=place) for place in range(len(INTS))]
    made += [builder.make(Op.FLOAT_NUMBER, value=place) for place in range(len(FLOATS))]
    made += [builder.constant(chance.randint(-4, 40)), builder.constant(chance.uniform(-2, 2))]
    made += [builder.make(Op.LOAD, place, value=0) for place in (query, key)]
    for _ in range(steps):
        first = chance.choice(made[-8:] if chance.random() < 0.5 else made)
        kind = builder.kinds[first]
        other = chance.choice([place for place in made if builder.kinds[place] is kind])
        conditions = [place for place in made if builder.kinds[place] is Kind.BOOL]
        step = chance.random()
        if step < 0.35 and kind is not Kind.BOOL:
            made.append(builder.make(chance.choice(_COMPARED), first, other))
        elif step < 0.75:
            made.append(_computed(builder, chance, kind, first, other))
        elif step < 0.85 and conditions:
            made.append(builder.make(Op.WHERE, chance.choice(conditions), first, other))
        else:
            made.append(_loaded(builder, chance, made))
    bools = [
        place
        for place in made
        if builder.kinds[place] is Kind.BOOL and builder.nodes[place].op is not Op.BOOL
    ]
    bools = bools or [builder.make(Op.LESS, key, query)]
    # The last one depends on few operations more often than two do.
    mask = builder.make(chance.choice((Op.AND, Op.OR, Op.NOT_EQUAL)), bools[-1], bools[-2 % len(bools)])
    mask = bools[-1] if builder.nodes[mask].op is Op.BOOL else mask
    functions, captures = builder.finish(-1, mask)
    ints = tuple(INTS[place] for place in captures.ints)
    return functions, ints, tuple(tables[place][1] for place in captures.tables)


def _computed(builder: Builder, chance: random.Random, kind: Kind, first: int, other: int) -> int:
    """An operation with values that are defined. Products of ints do not exceed 32 bits."""
    op = chance.choice({Kind.INT: _OF_INTS, Kind.FLOAT: _OF_FLOATS, Kind.BOOL: _OF_BOOLS}[kind])
    if op in (Op.FLOOR_DIVIDE, Op.REMAINDER):
        bound = builder.constant(chance.choice((-3, 1, 5)))
        other = bound if chance.random() < 0.5 else builder.make(Op.MAXIMUM, builder.constant(1), other)
    if op in (Op.SHIFT_LEFT, Op.SHIFT_RIGHT):
        other = builder.constant(chance.randrange(6))
    count = 1 if op in (Op.NEGATE, Op.ABS, Op.NOT, Op.TO_INT, Op.TO_FLOAT, *_OF_FLOATS[8:]) else 2
    result = builder.make(op, *(first, other)[:count])
    if op in (Op.MULTIPLY, Op.SHIFT_LEFT) and kind is Kind.INT:
        return builder.make(Op.REMAINDER, result, builder.constant(chance.choice((97, 1000))))
    if op is Op.TO_FLOAT and chance.random() < 0.3:
        return builder.make(Op.TO_INT, builder.make(Op.MULTIPLY, result, builder.constant(0.3)))
    return result


def _loaded(builder: Builder, chance: random.Random, made: list[int]) -> int:
    """An element of a captured tensor, indexed by a position or by any int."""
    _, key, head, *_, batch = made[:6]
    table = chance.randrange(5)
    index = chance.choice([place for place in made if builder.kinds[place] is Kind.INT])
    if table in (0, 1, 4):
        return builder.make(Op.LOAD, index, value=table)
    return builder.make(Op.LOAD, batch if table == 2 else head, chance.choice((key, index)), value=table)
