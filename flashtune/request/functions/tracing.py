"""Score and mask functions of users as expressions, traced with `torch.fx`.

No text of a function reaches a kernel. Captured numbers and tensors become inputs of the call, so that other
values need no other kernel. A captured number that decides a function's control flow becomes a constant.
"""

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flashtune.core.caches import keep
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.nodes import (
    MAX_DIMENSIONS,
    MAX_NUMBERS,
    Functions,
    Kind,
    Op,
    Table,
    TableDtype,
)
from flashtune.core.expressions.text import functions_text
from flashtune.request.functions.closures import State, replaced, state
from flashtune.request.functions.conversion import operation
from flashtune.request.functions.operands import Constant, Partial, Unsupported, place_of

Function = Callable[..., Any]
TABLE_DTYPES = {
    torch.bool: TableDtype.BOOL,
    torch.int32: TableDtype.INT32,
    torch.int64: TableDtype.INT64,
    torch.float16: TableDtype.FP16,
    torch.bfloat16: TableDtype.BF16,
    torch.float32: TableDtype.FP32,
}
# Captured tensors have up to so many elements, because offsets have 32 bits.
MAX_ELEMENTS = 2**31 - 1
PLACES = (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY)
# Frames of these files are not a user's.
_OWN_FILES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
# Functions that make a tensor of Python's numbers, and those that read properties of tensors.
_MAKERS = ("tensor", "scalar_tensor", "full", "zeros", "ones", "as_tensor")
_PROPERTIES = ("__get__", "size", "dim", "stride", "numel", "is_floating_point")


class Traced(NamedTuple):
    """The functions of a call, and their captured values in the order of the expression."""

    functions: Functions
    text: str  # The functions as text.
    tables: tuple[Tensor, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    # Whether the mask hides keys that the score function gives a score of minus infinity.
    hides_scores: bool


class _NeedsValue(Exception):  # noqa: N818 - becomes an error with the function
    """Python needs the value of a traced number, at this line."""


class _Known(NamedTuple):
    """Traced functions, valid while the captured tensors live."""

    tensors: "list[weakref.ref[Tensor]]"
    tables: "list[weakref.ref[Tensor]]"
    traced: Traced  # Without its tables.


# By captured values and code, because programs define functions again in each call.
_expressions: dict[tuple[object, ...], _Known] = {}
MAX_KNOWN = 1024


def trace(score_mod: Function | None, mask_mod: Function | None) -> Traced:
    """Returns the expressions of a score function and a mask function.

    Args:
        score_mod: A function of (score, batch, head, query, key) that returns the changed score, or None.
        mask_mod: A function of (batch, head, query, key) that returns whether the key is visible, or None.

    Raises:
        ProblemError: A function has an operation that kernels do not compute.
    """
    score_mod, mask_mod = _function("score_mod", score_mod), _function("mask_mod", mask_mod)
    captured = _state(score_mod, mask_mod)
    known = _traced_before(captured)
    if known is not None:
        return known
    capture = _Capture()
    places = [
        -1 if function is None else _traced(function, name, capture)
        for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod))
    ]
    functions, order = capture.builder.finish(*places)
    traced = Traced(
        functions,
        functions_text(functions),
        tuple(capture.tensors[place] for place in order.tables),
        tuple(int(capture.ints[place]) for place in order.ints),
        tuple(float(capture.floats[place]) for place in order.floats),
        order.hides_scores,
    )
    # Tables are captured tensors themselves, and not made of them.
    if (
        captured is not None
        and capture.is_stable
        and {*map(id, traced.tables)} <= {*map(id, captured.tensors)}
    ):
        tensors, tables = ([*map(weakref.ref, part)] for part in (captured.tensors, traced.tables))
        keep(_expressions, captured.values, _Known(tensors, tables, traced._replace(tables=())), MAX_KNOWN)
    return traced


def is_stable(score_mod: Function | None, mask_mod: Function | None) -> bool:
    """Returns whether functions with the same captured objects have the same expressions and tensors."""
    return _traced_before(_state(score_mod, mask_mod)) is not None


def _traced_before(captured: State | None) -> Traced | None:
    """Returns the expressions of functions with this code and these captured values, if there are any."""
    known = None if captured is None else _expressions.get(captured.values)
    if known is None:
        return None
    # Tensors of other calls may have had the same identities.
    if any(reference() is None for reference in known.tensors):
        return None
    tables = (reference() for reference in known.tables)
    return known.traced._replace(tables=tuple(table for table in tables if table is not None))


def _function(name: str, function: Function | None) -> Function | None:
    """Returns a function without torch's wrappers."""
    own = getattr(function, "fn", None)
    if type(function).__name__ == "_MaskModWrapper" and callable(own):
        function = own
    if function is not None and not callable(function):
        raise ProblemError(f"{name} is {type(function).__name__}: pass a function or None")
    return function


def _state(*functions: Function | None) -> State | None:
    """Returns the captured values of some functions."""
    values: list[object] = []
    tensors: list[Tensor] = []
    for function in functions:
        own = State((), ()) if function is None else state(function)
        if own is None:
            return None
        values.append(own.values)
        tensors += own.tensors
    return State(tuple(values), tuple(tensors))


class _Capture:
    """Captured values of both functions, by their places in the builder."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.tensors: list[Tensor] = []
        self.ints: list[float] = []
        self.floats: list[float] = []
        # Whether tensors are those that the functions capture, and none is computed from their elements.
        self.is_stable = True

    def table(self, tensor: Tensor) -> Partial:
        """Returns a captured tensor as an operand."""
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return Partial(place, tuple(tensor.shape))
        if tensor.dtype not in TABLE_DTYPES:
            raise Unsupported(f"a captured tensor is {tensor.dtype}: convert it to torch.float32 or int32")
        if tensor.dim() > MAX_DIMENSIONS or tensor.numel() > MAX_ELEMENTS:
            raise Unsupported(
                f"a captured tensor is {list(tensor.shape)}: kernels take up to {MAX_DIMENSIONS} dimensions "
                f"and {MAX_ELEMENTS} elements"
            )
        self.tensors.append(tensor)
        self.builder.tables.append(Table(TABLE_DTYPES[tensor.dtype], tensor.dim()))
        return Partial(len(self.tensors) - 1, tuple(tensor.shape))

    def number(self, value: float) -> int:
        """Returns a captured number as an operand."""
        numbers, op = (self.ints, Op.INT_NUMBER) if isinstance(value, int) else (self.floats, Op.FLOAT_NUMBER)
        if len(numbers) == MAX_NUMBERS:
            raise Unsupported(f"functions capture over {MAX_NUMBERS} numbers: capture a tensor of them")
        numbers.append(value)
        return self.builder.make(op, value=len(numbers) - 1)


class _Tracer(fx.Tracer):
    """Records the operations of one function."""

    def __init__(self, capture: _Capture) -> None:
        super().__init__()
        self.graph = fx.Graph(tracer_cls=_Tracer)
        self.root = torch.nn.Module()
        self.capture = capture
        self.tensor_attrs = {}
        self.operands: dict[fx.Node, Any] = {}
        self.lines: dict[fx.Node, str] = {}
        # Tensors of numbers that the function makes. They stay alive, so that identities are unique.
        self.constants: dict[int, tuple[Tensor, float]] = {}

    def operand(self, operand: Any) -> fx.Proxy:
        """Returns a new input with this operand of the expression."""
        proxy: fx.Proxy = self.create_proxy("placeholder", "captured", (), {})
        self.operands[proxy.node] = operand
        return proxy

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Records an operation with its line."""
        node = super().create_node(*args, **kwargs)
        self.lines[node] = _line()
        return node

    def create_arg(self, a: Any) -> Any:
        """Returns an argument as the graph has it. A tensor is a captured one."""
        if isinstance(a, Tensor):
            known = self.constants.get(id(a))
            operand = Constant(known[1]) if known else self.capture.table(a)
            return self.operand(operand).node
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuses control flow."""
        del obj
        raise _NeedsValue(_line())

    def iter(self, obj: fx.Proxy) -> Any:
        """Refuses iteration."""
        self.to_bool(obj)

    def keys(self, obj: fx.Proxy) -> Any:
        """Refuses unpacking."""
        self.to_bool(obj)


class _Calls(TorchFunctionMode):
    """Records torch's functions that get both tensors and traced values."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _MAKERS and isinstance(result, Tensor) and not result.dim():
            self.tracer.constants[id(result)] = result, result.item()
        elif name not in _PROPERTIES and not _shares_memory(result, leaves):
            self.tracer.capture.is_stable = False
        return result


def _shares_memory(result: object, leaves: list[Any]) -> bool:
    """Returns whether a tensor is a view of one of some values."""
    if not isinstance(result, Tensor):
        return False
    own = result.untyped_storage().data_ptr()
    return any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == own for leaf in leaves)


def _traced(function: Function, name: str, capture: _Capture) -> int:
    """Returns the place of a function's result."""
    counts = len(capture.ints), len(capture.floats)
    try:
        tracer, result = _run(function, name, capture, symbolic=True)
    except ProblemError:
        raise
    except Exception:  # noqa: BLE001 - functions may raise any error for values that are not tensors
        # A number that decides control flow, or that Python's `math` reads, is a constant.
        del capture.ints[counts[0] :], capture.floats[counts[1] :]
        try:
            tracer, result = _run(function, name, capture, symbolic=False)
        except _NeedsValue as error:
            raise ProblemError(
                f"{name} uses a traced value as a Python bool or sequence at {error}: write torch.where for "
                "`if`, and & for `and`"
            ) from None
        except ProblemError:
            raise
        except Exception as error:
            # Functions may raise any error for values that are not tensors.
            raise ProblemError(f"{name} cannot be traced at {_line_of(error)}: {error!r}") from error
    return _converted(tracer, name, result, capture)


def _run(function: Function, name: str, capture: _Capture, *, symbolic: bool) -> tuple[_Tracer, object]:
    """Calls a function with traced arguments, and with traced captured numbers if `symbolic`."""
    tracer = _Tracer(capture)
    ops = (Op.SCORE, *PLACES) if name == "score_mod" else PLACES
    arguments = [tracer.operand(capture.builder.make(op)) for op in ops]

    def number(value: float) -> object:
        return tracer.operand(capture.number(value)) if symbolic else value

    try:
        function = replaced(function, number)
        with _Calls(tracer):
            result = function(*arguments)
        # The node of an attribute is made when it is first read.
        return tracer, result.node if isinstance(result, fx.Proxy) else result
    except Unsupported as error:
        raise ProblemError(f"{name} is not supported at {_line_of(error)}: {error}") from None


def _converted(tracer: _Tracer, name: str, result: object, capture: _Capture) -> int:
    """Returns the place of a traced result."""
    builder = capture.builder

    def operand(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return tracer.operands[argument]
        if isinstance(argument, (bool, int, float)):
            return Constant(argument)
        return tuple(map(operand, argument)) if isinstance(argument, (tuple, list)) else argument

    shown, line = "its result", ""
    try:
        for node in tracer.graph.nodes:
            if node.op == "placeholder":
                continue
            shown, line = _name(node), tracer.lines[node]
            arguments = [operand(argument) for argument in node.args]
            options = {key: operand(argument) for key, argument in node.kwargs.items()}
            tracer.operands[node] = operation(builder, shown, arguments, options)
        shown = "its result"
        value = result if isinstance(result, fx.Node) else tracer.create_arg(result)
        place = place_of(builder, operand(value))
        if name == "score_mod":
            return builder.to_float(place)
        if builder.kinds[place] is not Kind.BOOL:
            raise Unsupported(f"it is {builder.kinds[place]} instead of bool")
    except Unsupported as error:
        at = f" at {line}" if line else ""
        raise ProblemError(f"{name} has an unsupported operation, {shown}{at}: {error}") from None
    return place


def _name(node: fx.Node) -> str:
    """Returns the name of a node's operation."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = getattr(target, "_qualified_op_name", str(target)).partition("::")
        # Operators of other libraries may have equal names.
        name = name.partition(".")[0] if namespace == "aten" else f"{namespace}::{name}"
    return (
        name if name.endswith("_") and not name.startswith("_") and name not in _PYTHON else name.strip("_")
    )


# Operators of Python with names that end with an underscore. Torch's such functions change their operands.
_PYTHON = ("and_", "or_", "not_")


def _line() -> str:
    """Returns the file and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _line_of(error: BaseException) -> str:
    """Returns the last line of the user's code in a traceback."""
    found = "?"
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_OWN_FILES):
            found = f"{Path(filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
