"""The conversion of traced operations to expressions. Operations outside of a closed list are refused."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import Kind, Op

_KINDS = {
    torch.bool: Kind.BOOL,
    **dict.fromkeys((torch.int32, torch.int64), Kind.INT),
    torch.float32: Kind.FLOAT,
}
MAX_POWER = 8


class Unsupported(Exception):  # noqa: N818 - becomes an error with the function and the line
    """An operation is not in the list, with its reason as the end of a sentence."""


class Partial(NamedTuple):
    """A captured tensor with the first of its indices."""

    table: int
    indices: tuple[int, ...] = ()


Handler = Callable[..., Any]


def operation(builder: Builder, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Returns the value of an operation by its torch or Python name, a place in the builder or a `Partial`.

    Operands are places or partially indexed tensors. Python's numbers are constants, wrapped as `Constant`.
    """
    handler = HANDLERS.get(name)
    if handler is None:
        raise Unsupported("it is not one of the operations that kernels compute")
    try:
        return handler(builder, *arguments, **options)
    except TypeError as error:
        raise Unsupported("its arguments are not supported") from error


class Constant(NamedTuple):
    """A number of the program text or a number that decided its control flow."""

    value: float


def place_of(builder: Builder, operand: Any) -> int:
    """Returns an operand as a place in the builder."""
    if type(operand) is int:
        return operand
    if isinstance(operand, Constant):
        return builder.constant(operand.value)
    if isinstance(operand, Partial):
        missing = builder.tables[operand.table].dimensions - len(operand.indices)
        if missing:
            raise Unsupported(f"a captured tensor lacks {missing} of its indices: index each dimension")
        return builder.make(Op.LOAD, *operand.indices, value=operand.table)
    raise Unsupported(f"an operand is {type(operand).__name__}")


def _of(function: Callable[..., int], count: int) -> Handler:
    """Returns the handler of a function of so many values."""

    def handler(builder: Builder, *operands: Any) -> int:
        if len(operands) != count:
            raise TypeError
        return function(builder, *(place_of(builder, operand) for operand in operands))

    return handler


def _pair(op: Op) -> Handler:
    def pair(builder: Builder, first: int, other: int) -> int:
        if builder.kinds[first] is builder.kinds[other] is Kind.BOOL and op not in (Op.EQUAL, Op.NOT_EQUAL):
            logical = {Op.ADD: Op.OR, Op.MULTIPLY: Op.AND, Op.MAXIMUM: Op.OR, Op.MINIMUM: Op.AND}.get(op)
            if logical is None:
                raise Unsupported("its operands are bools")
            return builder.make(logical, first, other)
        return builder.promoted(op, first, other)

    return _of(pair, 2)


def _swapped(op: Op) -> Handler:
    return _of(lambda builder, first, other: builder.promoted(op, other, first), 2)


def _of_ints(op: Op) -> Handler:
    def pair(builder: Builder, first: int, other: int) -> int:
        if Kind.FLOAT in (builder.kinds[first], builder.kinds[other]):
            raise Unsupported("it is computed of integers alone")
        return builder.promoted(op, first, other)

    return _of(pair, 2)


def _logical(op: Op, of_bools: bool) -> Handler:
    def logical(builder: Builder, *operands: int) -> int:
        if of_bools and any(builder.kinds[place] is not Kind.BOOL for place in operands):
            raise Unsupported("it is computed of bools alone")
        return builder.make(op, *(builder.to_bool(place) for place in operands))

    return _of(logical, 1 if op is Op.NOT else 2)


def _exclusive(builder: Builder, first: int, other: int) -> int:
    if {builder.kinds[first], builder.kinds[other]} != {Kind.BOOL}:
        raise Unsupported("it is computed of bools alone")
    return builder.make(Op.NOT_EQUAL, first, other)


def _float(op: Op, before: float = 1.0, after: float = 1.0) -> Handler:
    """Returns the handler of a function of a float, with factors of its operand and result."""

    def function(builder: Builder, operand: int) -> int:
        operand = builder.make(Op.MULTIPLY, builder.to_float(operand), builder.constant(before))
        return builder.make(Op.MULTIPLY, builder.make(op, operand), builder.constant(after))

    return _of(function, 1)


def _number(op: Op) -> Handler:
    def function(builder: Builder, operand: int) -> int:
        if builder.kinds[operand] is Kind.BOOL:
            raise Unsupported("its operand is bool")
        return builder.make(op, operand)

    return _of(function, 1)


def _sigmoid(builder: Builder, operand: int) -> int:
    one = builder.constant(1.0)
    power = builder.make(Op.EXP, builder.make(Op.NEGATE, builder.to_float(operand)))
    return builder.make(Op.DIVIDE, one, builder.make(Op.ADD, one, power))


def _power(builder: Builder, operand: Any, exponent: Any) -> int:
    base = place_of(builder, operand)
    number = exponent.value if isinstance(exponent, Constant) else None
    if number is None or number not in range(1, MAX_POWER + 1) or builder.kinds[base] is Kind.BOOL:
        raise Unsupported(f"exponents are literal integers from 1 to {MAX_POWER}")
    result = base
    for _ in range(int(number) - 1):
        result = builder.make(Op.MULTIPLY, result, base)
    return result


def _divide(builder: Builder, first: Any, other: Any, rounding_mode: Any = None) -> int:
    if rounding_mode is None:
        return builder.promoted(Op.DIVIDE, place_of(builder, first), place_of(builder, other))
    if rounding_mode == "floor":
        return int(_of_ints(Op.FLOOR_DIVIDE)(builder, first, other))
    raise Unsupported("the one rounding mode is 'floor'")


def _clamp(builder: Builder, operand: Any, min: Any = None, max: Any = None) -> int:  # noqa: A002 - torch's names
    result = place_of(builder, operand)
    for op, bound in ((Op.MAXIMUM, min), (Op.MINIMUM, max)):
        if bound is not None:
            result = builder.promoted(op, result, place_of(builder, bound))
    return result


def _where(builder: Builder, condition: Any, first: Any, other: Any) -> int:
    chosen = place_of(builder, condition)
    if builder.kinds[chosen] is not Kind.BOOL:
        raise Unsupported("its condition is not bool")
    return builder.where(chosen, place_of(builder, first), place_of(builder, other))


def _converted(builder: Builder, operand: int, kind: Kind) -> int:
    conversions = {Kind.FLOAT: builder.to_float, Kind.INT: builder.to_int, Kind.BOOL: builder.to_bool}
    return conversions[kind](operand)


def _conversion(kind: Kind) -> Handler:
    return _of(lambda builder, operand: _converted(builder, operand, kind), 1)


def _to(builder: Builder, operand: Any, dtype: Any = None, **options: Any) -> int:
    if dtype not in _KINDS or options:
        raise Unsupported("types are torch.bool, torch.int32, torch.int64 and torch.float32")
    return _converted(builder, place_of(builder, operand), _KINDS[dtype])


def _full(value: float | None, takes_size: bool) -> Handler:
    """Returns the handler of a function that makes a constant of its operand's type, or of `dtype`."""

    def constant(builder: Builder, operand: Any, *more: Any, **options: Any) -> int:
        options.pop("device", None)
        dtype, filled = options.pop("dtype", None), options.pop("fill_value", None)
        rest = list(more)
        size = options.pop("size", rest.pop(0) if takes_size and rest else ())
        if value is not None:
            filled = Constant(value)
        elif filled is None and rest:
            filled = rest.pop(0)
        if rest or options or (tuple(size) if size else ()) or dtype not in (None, *_KINDS):
            raise TypeError
        kind = builder.kinds[place_of(builder, operand)] if dtype is None else _KINDS[dtype]
        return _converted(builder, place_of(builder, filled), kind)

    return constant


def _property(builder: Builder, operand: Any, name: Any) -> Any:
    if name not in ("dtype", "device"):
        raise Unsupported(f"it reads the property {name} of a traced value")
    kind = builder.kinds[place_of(builder, operand)]
    dtypes = {Kind.BOOL: torch.bool, Kind.INT: torch.int32, Kind.FLOAT: torch.float32}
    return dtypes[kind] if name == "dtype" else None


def _item(builder: Builder, tensor: Any, index: Any) -> Partial:
    if not isinstance(tensor, Partial):
        raise Unsupported("only captured tensors have indices")
    given = index if isinstance(index, tuple) else (index,)
    places = [place_of(builder, item) for item in given]
    if any(builder.kinds[place] is not Kind.INT for place in places):
        raise Unsupported("indices are integers")
    indices = (*tensor.indices, *places)
    dimensions = builder.tables[tensor.table].dimensions
    if len(indices) > dimensions:
        raise Unsupported(f"a tensor of {dimensions} dimensions has {len(indices)} indices")
    return Partial(tensor.table, indices)


def _names(handler: Handler, *names: str) -> dict[str, Handler]:
    return dict.fromkeys(names, handler)


# By the names of torch's functions and methods and of Python's operators, without underscores at their ends.
HANDLERS: Mapping[str, Handler] = {
    **_names(_pair(Op.ADD), "add", "radd"),
    **_names(_pair(Op.SUBTRACT), "sub", "subtract"),
    **_names(_swapped(Op.SUBTRACT), "rsub"),
    **_names(_pair(Op.MULTIPLY), "mul", "multiply", "rmul"),
    **_names(_divide, "div", "divide", "true_divide", "truediv"),
    **_names(_swapped(Op.DIVIDE), "rdiv", "rtruediv"),
    **_names(_of_ints(Op.FLOOR_DIVIDE), "floordiv", "floor_divide"),
    **_names(_of_ints(Op.REMAINDER), "mod", "remainder"),
    **_names(_pair(Op.MINIMUM), "minimum", "min"),
    **_names(_pair(Op.MAXIMUM), "maximum", "max"),
    **_names(_pair(Op.LESS), "lt", "less"),
    **_names(_swapped(Op.LESS), "gt", "greater"),
    **_names(_pair(Op.LESS_EQUAL), "le", "less_equal"),
    **_names(_swapped(Op.LESS_EQUAL), "ge", "greater_equal"),
    **_names(_pair(Op.EQUAL), "eq"),
    **_names(_pair(Op.NOT_EQUAL), "ne", "not_equal"),
    **_names(_logical(Op.AND, True), "and", "bitwise_and", "rand"),
    **_names(_logical(Op.OR, True), "or", "bitwise_or", "ror"),
    **_names(_logical(Op.NOT, True), "invert", "bitwise_not"),
    **_names(_of(_exclusive, 2), "xor", "bitwise_xor", "logical_xor"),
    "logical_and": _logical(Op.AND, False),
    "logical_or": _logical(Op.OR, False),
    "logical_not": _logical(Op.NOT, False),
    **_names(_number(Op.NEGATE), "neg", "negative"),
    **_names(_number(Op.ABS), "abs", "absolute"),
    "tanh": _float(Op.TANH),
    "exp": _float(Op.EXP),
    "exp2": _float(Op.EXP, before=math.log(2)),
    "log": _float(Op.LOG),
    "log2": _float(Op.LOG, after=1 / math.log(2)),
    "sigmoid": _of(_sigmoid, 1),
    "pow": _power,
    "square": lambda builder, operand: _power(builder, operand, Constant(2)),
    "relu": lambda builder, operand: _clamp(builder, operand, Constant(0)),
    **_names(_clamp, "clamp", "clip"),
    "clamp_min": _clamp,
    "clamp_max": lambda builder, operand, max: _clamp(builder, operand, None, max),  # noqa: A006 - torch's name
    "where": _where,
    **_names(_conversion(Kind.FLOAT), "float"),
    **_names(_conversion(Kind.INT), "int", "long"),
    "bool": _conversion(Kind.BOOL),
    **_names(_to, "to", "type"),
    "zeros_like": _full(0, False),
    "ones_like": _full(1, False),
    "full_like": _full(None, False),
    "new_zeros": _full(0, True),
    "new_ones": _full(1, True),
    "new_full": _full(None, True),
    "getattr": _property,
    "getitem": _item,
}
