"""The conversion of traced operations to expressions. Operations outside of a closed list are refused."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import MAX_SHIFT, Kind, Op
from flashtune.request.functions.operands import (
    MAX_ROW,
    Constant,
    Partial,
    Row,
    Unsupported,
    combined,
    place_of,
    row_of,
)

_KINDS = {
    torch.bool: Kind.BOOL,
    **dict.fromkeys((torch.int32, torch.int64), Kind.INT),
    torch.float32: Kind.FLOAT,
}
MAX_POWER = 8
# Above this operand, `softplus` returns it, as torch's does.
SOFTPLUS_LIMIT = 20.0
# The exponential of this operand is finite in float32.
EXP_LIMIT = 87.0
Handler = Callable[..., Any]


def operation(builder: Builder, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Returns the value of an operation by its torch or Python name, a place in the builder or a `Partial`.

    Operands are places or partially indexed tensors. Python's numbers are constants, wrapped as `Constant`.
    """
    if name not in HANDLERS and name not in _OF_ROWS:
        raise Unsupported("it is not one of the operations that kernels compute")
    try:
        if name in _OF_ROWS:
            return _OF_ROWS[name](builder, *arguments, **options)
        return _elementwise(builder, HANDLERS[name], arguments, options)
    except TypeError as error:
        raise Unsupported("its arguments are not supported") from error


def _elementwise(builder: Builder, handler: Handler, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Returns the result of an operation, of each element if an operand is a row."""
    arguments = [row_of(builder, argument) or argument for argument in arguments]
    options = {name: row_of(builder, option) or option for name, option in options.items()}
    lengths = {len(value) for value in (*arguments, *options.values()) if isinstance(value, Row)}
    if not lengths:
        return handler(builder, *arguments, **options)
    length = max(lengths)
    if lengths - {1, length}:
        raise Unsupported(f"rows of {' and '.join(map(str, sorted(lengths)))} elements do not broadcast")

    def element(value: Any, index: int) -> Any:
        return value[index if len(value) > 1 else 0] if isinstance(value, Row) else value

    return Row(
        handler(
            builder,
            *(element(argument, index) for argument in arguments),
            **{name: element(option, index) for name, option in options.items()},
        )
        for index in range(length)
    )


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
    return _of(lambda builder, first, other: _integers(builder, op, first, other), 2)


def _integers(builder: Builder, op: Op, first: int, other: int) -> int:
    """Returns an operation of integers."""
    if Kind.FLOAT in (builder.kinds[first], builder.kinds[other]):
        raise Unsupported("it is computed of integers alone")
    return builder.make(op, builder.to_int(first), builder.to_int(other))


def _logical(op: Op) -> Handler:
    def logical(builder: Builder, *operands: int) -> int:
        return builder.make(op, *(builder.to_bool(place) for place in operands))

    return _of(logical, 1 if op is Op.NOT else 2)


def _bitwise(op: Op) -> Handler:
    """Returns the handler of a logical operation of bools, or of the bits of ints."""

    def bitwise(builder: Builder, first: int, other: int) -> int:
        if {builder.kinds[first], builder.kinds[other]} == {Kind.BOOL}:
            return builder.make(Op.NOT_EQUAL if op is Op.XOR else op, first, other)
        return _integers(builder, op, first, other)

    return _of(bitwise, 2)


def _inverted(builder: Builder, operand: int) -> int:
    match builder.kinds[operand]:
        case Kind.BOOL:
            return builder.make(Op.NOT, operand)
        case Kind.INT:
            return builder.make(Op.SUBTRACT, builder.make(Op.NEGATE, operand), builder.constant(1))
    raise Unsupported("it is computed of bools and integers alone")


def _shift(op: Op) -> Handler:
    def shift(builder: Builder, first: int, count: int) -> int:
        last = builder.constant(MAX_SHIFT)
        # More bits than there are shift all of them out.
        within = builder.promoted(Op.MINIMUM, builder.promoted(Op.MAXIMUM, count, builder.constant(0)), last)
        shifted = _integers(builder, op, first, within)
        if op is Op.SHIFT_RIGHT:
            return shifted
        return builder.where(builder.promoted(Op.LESS, last, count), builder.constant(0), shifted)

    return _of(shift, 2)


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
    one, opposite = builder.constant(1.0), builder.make(Op.NEGATE, builder.to_float(operand))
    # An infinite exponential would make the derivative NaN.
    power = builder.make(Op.EXP, builder.make(Op.MINIMUM, opposite, builder.constant(EXP_LIMIT)))
    return builder.make(Op.DIVIDE, one, builder.make(Op.ADD, one, power))


def _activation(function: Handler) -> Handler:
    """Returns the handler of a function that has an option to change its operand."""

    def activation(builder: Builder, operand: Any, inplace: Any = Constant(False)) -> Any:  # noqa: B008
        if inplace != Constant(False):
            raise Unsupported("it changes its operand")
        return function(builder, place_of(builder, operand))

    return activation


def _relu(builder: Builder, operand: int) -> int:
    # Not a maximum: the derivative of a maximum at 0 is 1.
    zero = builder.constant(0)
    return builder.where(builder.promoted(Op.LESS_EQUAL, operand, zero), zero, operand)


def _silu(builder: Builder, operand: int) -> int:
    return builder.make(Op.MULTIPLY, builder.to_float(operand), _sigmoid(builder, operand))


def _softplus(builder: Builder, operand: int) -> int:
    operand, one, limit = builder.to_float(operand), builder.constant(1.0), builder.constant(SOFTPLUS_LIMIT)
    # The exponential does not overflow.
    power = builder.make(Op.EXP, builder.make(Op.MINIMUM, operand, limit))
    smooth = builder.make(Op.LOG, builder.make(Op.ADD, one, power))
    return builder.make(Op.WHERE, builder.make(Op.LESS_EQUAL, operand, limit), smooth, operand)


def _gelu(builder: Builder, operand: Any, approximate: str = "none") -> int:
    operand = builder.to_float(place_of(builder, operand))

    def scaled(place: int, factor: float) -> int:
        return builder.make(Op.MULTIPLY, place, builder.constant(factor))

    if approximate == "none":
        share = builder.make(Op.ERF, scaled(operand, 0.5**0.5))
    else:
        cube = _power(builder, operand, Constant(3))
        inner = builder.make(Op.ADD, operand, scaled(cube, 0.044715))
        share = builder.make(Op.TANH, scaled(inner, (2 / math.pi) ** 0.5))
    half = scaled(builder.make(Op.ADD, builder.constant(1.0), share), 0.5)
    return builder.make(Op.MULTIPLY, operand, half)


def _tangent(builder: Builder, operand: int) -> int:
    operand = builder.to_float(operand)
    return builder.make(Op.DIVIDE, builder.make(Op.SIN, operand), builder.make(Op.COS, operand))


def _reciprocal_root(builder: Builder, operand: int) -> int:
    return builder.make(Op.DIVIDE, builder.constant(1.0), builder.make(Op.SQRT, builder.to_float(operand)))


def _power(builder: Builder, operand: Any, exponent: Any) -> int:
    base = place_of(builder, operand)
    number = exponent.value if isinstance(exponent, Constant) else None
    if number == 0.5:
        return builder.make(Op.SQRT, builder.to_float(base))
    if number is None or number not in range(1, MAX_POWER + 1) or builder.kinds[base] is Kind.BOOL:
        raise Unsupported(f"exponents are 0.5 or literal integers from 1 to {MAX_POWER}")
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


def _to(builder: Builder, operand: Any, *targets: Any, dtype: Any = None, device: Any = None) -> int:
    place = place_of(builder, operand)
    for target in (*targets, dtype, device):
        if target in _KINDS:
            place = _converted(builder, place, _KINDS[target])
        elif target is not None and not isinstance(target, (str, torch.device)):
            # The device of a traced value is None.
            raise Unsupported("types are torch.bool, torch.int32, torch.int64 and torch.float32")
    return place


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
    if name == "shape" and row_of(builder, operand) is None:
        return ()
    if name not in ("dtype", "device"):
        raise Unsupported(f"it reads the property {name} of a traced value")
    kind = builder.kinds[place_of(builder, operand)]
    dtypes = {Kind.BOOL: torch.bool, Kind.INT: torch.int32, Kind.FLOAT: torch.float32}
    return dtypes[kind] if name == "dtype" else None


def _item(builder: Builder, tensor: Any, index: Any) -> Any:
    if isinstance(tensor, Row):
        number = index.value if isinstance(index, Constant) else None
        if type(number) is not int or not -len(tensor) <= number < len(tensor):
            raise Unsupported(f"a row of {len(tensor)} elements has literal integers as indices")
        return tensor[number]
    if not isinstance(tensor, Partial):
        raise Unsupported("only captured tensors have indices")
    given = tuple(index) if isinstance(index, tuple) and not isinstance(index, Row) else (index,)
    places = [place_of(builder, item) for item in given]
    if any(builder.kinds[place] is not Kind.INT for place in places):
        raise Unsupported("indices are integers")
    indices = (*tensor.indices, *places)
    dimensions = builder.tables[tensor.table].dimensions
    if len(indices) > dimensions:
        raise Unsupported(f"a tensor of {dimensions} dimensions has {len(indices)} indices")
    return Partial(tensor.table, tensor.sizes, indices)


def _reduced(op: Op, is_mean: bool = False) -> Handler:
    """Returns the handler of a reduction of a row."""

    def reduction(builder: Builder, operand: Any, dim: Any = None, keepdim: Any = False) -> Any:
        if dim not in (None, Constant(-1), Constant(0)):
            raise Unsupported("the dimension of a reduction is the last one")
        row = row_of(builder, operand) or Row((place_of(builder, operand),))
        if op in (Op.AND, Op.OR):
            row = Row(map(builder.to_bool, row))
        elif op is Op.ADD and builder.kinds[row[0]] is Kind.BOOL:
            row = Row(map(builder.to_int, row))
        result = combined(builder, op, row)
        if is_mean:
            result = builder.promoted(Op.DIVIDE, result, builder.constant(len(row)))
        return Row((result,)) if keepdim else result

    return reduction


def _dot(builder: Builder, first: Any, other: Any) -> int:
    left, right = row_of(builder, first), row_of(builder, other)
    if left is None or right is None or len(left) != len(right):
        raise Unsupported(f"its operands are rows of equal lengths, of up to {MAX_ROW} elements")
    products = Row(builder.promoted(Op.MULTIPLY, *pair) for pair in zip(left, right, strict=True))
    return combined(builder, Op.ADD, products)


def _unsqueezed(builder: Builder, operand: Any, dim: Any) -> Row:
    if dim not in (Constant(-1), Constant(0)) or row_of(builder, operand) is not None:
        raise Unsupported("the new dimension is the last one of a number")
    return Row((place_of(builder, operand),))


def _squeezed(builder: Builder, operand: Any, dim: Any = None) -> Any:
    del dim
    row = row_of(builder, operand)
    return operand if row is None or len(row) > 1 else row[0]


def _names(handler: Handler, *names: str) -> dict[str, Handler]:
    return dict.fromkeys(names, handler)


# Operations of each element, by names of torch and of Python's operators, without underscores at their ends.
HANDLERS: Mapping[str, Handler] = {
    **_names(_pair(Op.ADD), "add", "radd"),
    **_names(_pair(Op.SUBTRACT), "sub", "subtract"),
    "rsub": _swapped(Op.SUBTRACT),
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
    "eq": _pair(Op.EQUAL),
    **_names(_pair(Op.NOT_EQUAL), "ne", "not_equal"),
    **_names(_bitwise(Op.AND), "and", "bitwise_and", "rand"),
    **_names(_bitwise(Op.OR), "or", "bitwise_or", "ror"),
    **_names(_bitwise(Op.XOR), "xor", "bitwise_xor", "rxor"),
    **_names(_of(_inverted, 1), "invert", "bitwise_not"),
    **_names(_shift(Op.SHIFT_LEFT), "lshift", "bitwise_left_shift"),
    **_names(_shift(Op.SHIFT_RIGHT), "rshift", "bitwise_right_shift"),
    "logical_and": _logical(Op.AND),
    "logical_or": _logical(Op.OR),
    "logical_not": _logical(Op.NOT),
    "logical_xor": _logical(Op.NOT_EQUAL),
    **_names(_number(Op.NEGATE), "neg", "negative"),
    **_names(_number(Op.ABS), "abs", "absolute"),
    "tanh": _float(Op.TANH),
    "exp": _float(Op.EXP),
    "exp2": _float(Op.EXP, before=math.log(2)),
    "log": _float(Op.LOG),
    "log2": _float(Op.LOG, after=1 / math.log(2)),
    **{op.value: _float(op) for op in (Op.SIN, Op.COS, Op.SQRT, Op.ERF)},
    "tan": _of(_tangent, 1),
    "rsqrt": _of(_reciprocal_root, 1),
    "sigmoid": _of(_sigmoid, 1),
    "silu": _activation(_silu),
    "gelu": _gelu,
    "softplus": _of(_softplus, 1),
    "pow": _power,
    "square": lambda builder, operand: _power(builder, operand, Constant(2)),
    "relu": _activation(_relu),
    **_names(_clamp, "clamp", "clip"),
    "clamp_min": _clamp,
    "clamp_max": lambda builder, operand, max: _clamp(builder, operand, None, max),  # noqa: A006 - torch's name
    "where": _where,
    "float": _conversion(Kind.FLOAT),
    **_names(_conversion(Kind.INT), "int", "long"),
    "bool": _conversion(Kind.BOOL),
    **_names(_to, "to", "type"),
    "zeros_like": _full(0, False),
    "ones_like": _full(1, False),
    "full_like": _full(None, False),
    "new_zeros": _full(0, True),
    "new_ones": _full(1, True),
    "new_full": _full(None, True),
}
# Operations that take rows as they are.
_OF_ROWS: Mapping[str, Handler] = {
    "getattr": _property,
    **_names(_item, "getitem", "index"),
    "sum": _reduced(Op.ADD),
    "mean": _reduced(Op.ADD, is_mean=True),
    "any": _reduced(Op.OR),
    "all": _reduced(Op.AND),
    "amax": _reduced(Op.MAXIMUM),
    "amin": _reduced(Op.MINIMUM),
    **_names(_dot, "dot", "inner", "vdot", "matmul", "vecdot"),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
}
