"""Runs the launch code of a rendered module on symbols, and records its integer arithmetic as a program.

The functions of the module that make plans and descriptors run as they are, on tensors with symbols for sizes
and strides. Only code that chooses by a value is rewritten before: conditional expressions, `and`, `or`,
`not`, chained comparisons, `raise` under a condition, and Euclid's algorithm. Any other choice by a symbol is
an error.
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashtune.bundle.records import Instruction
from flashtune.core.errors import BundleError


class Program:
    """The instructions for the symbols that are used. Equal instructions are stored once."""

    def __init__(self) -> None:
        self.instructions: dict[Instruction, int] = {}
        self.tensors: dict[str, int] = {}

    def position(self, value: object) -> int:
        """Returns the position of an integer or symbol in the program."""
        if not isinstance(value, Symbol):
            return self._position("const", int(operator.index(value)))  # type: ignore[arg-type]
        if value.position is None:
            first, *rest = value.operands or (0,)
            if value.operation in ("size", "stride"):
                operands = self.tensors.setdefault(first, len(self.tensors)), *rest
            else:
                operands = tuple(map(self.position, value.operands))
            value.position = self._position(value.operation, *operands)
        return value.position

    def _position(self, operation: Any, *operands: int) -> int:
        instruction = Instruction(operation, *operands)
        return self.instructions.setdefault(instruction, len(self.instructions))


class Symbol:
    """An integer that is known when a launch is bound: the result of an operation."""

    def __init__(self, operation: str, *operands: Any) -> None:
        self.operation, self.operands = operation, operands
        self.position: int | None = None  # In the program.

    def __bool__(self) -> bool:
        raise BundleError("a plan chooses by a size or stride in a way that bundles do not support")

    def bit_length(self) -> Symbol:
        """Returns the number of bits of the integer."""
        return Symbol("bits", self)


for _method, _operation in (
    ("add", "add"),
    ("sub", "sub"),
    ("mul", "mul"),
    ("floordiv", "div"),
    ("mod", "mod"),
):
    setattr(Symbol, f"__{_method}__", lambda a, b, operation=_operation: Symbol(operation, a, b))
    setattr(Symbol, f"__r{_method}__", lambda a, b, operation=_operation: Symbol(operation, b, a))
_COMPARISONS: dict[str, Callable[[Any, Any], Symbol]] = {
    "eq": lambda a, b: Symbol("eq", a, b),
    "ne": lambda a, b: Symbol("eq", Symbol("eq", a, b), 0),
    "lt": lambda a, b: Symbol("lt", a, b),
    "gt": lambda a, b: Symbol("lt", b, a),
    "ge": lambda a, b: Symbol("eq", Symbol("lt", a, b), 0),
    "le": lambda a, b: Symbol("eq", Symbol("lt", b, a), 0),
}
for _method, _compare in _COMPARISONS.items():
    setattr(Symbol, f"__{_method}__", _compare)


class SymbolicTensor:
    """A tensor with symbols for its sizes and strides."""

    is_cuda = True
    device = None

    def __init__(self, name: str, dtype: Any, shape: Sequence[Any], strides: Sequence[Any]) -> None:
        self.name, self.dtype = name, dtype
        self.shape, self._strides = tuple(shape), tuple(strides)

    def stride(self, axis: int | None = None) -> Any:
        """Returns all strides, or that of an axis."""
        return self._strides if axis is None else self._strides[axis]

    def numel(self) -> Any:
        """Returns the number of elements."""
        return functools.reduce(operator.mul, self.shape)

    def view(self, dtype: torch.dtype) -> SymbolicTensor:
        """Returns a contiguous float32 workspace as another type."""
        shape = (*self.shape[:-1], self.shape[-1] * (4 // dtype.itemsize))
        return contiguous(self.name, dtype, shape)


def read_tensor(name: str, dtype: Any, dimensions: int) -> SymbolicTensor:
    """Returns a tensor of a call."""
    axes = range(dimensions)
    shape, strides = ([Symbol(kind, name, axis) for axis in axes] for kind in ("size", "stride"))
    return SymbolicTensor(name, dtype, shape, strides)


def contiguous(name: str, dtype: Any, shape: Sequence[Any]) -> SymbolicTensor:
    """Returns a tensor without gaps."""
    strides = [functools.reduce(operator.mul, shape[axis + 1 :], 1) for axis in range(len(shape))]
    return SymbolicTensor(name, dtype, shape, strides)


class SymbolicDescriptor(NamedTuple):
    """The arguments of `TensorDescriptor`."""

    base: SymbolicTensor
    shape: Sequence[Any]
    strides: Sequence[Any]
    block_shape: Sequence[int]
    layout: object


def symbolic_module(source: str, program: Program) -> SimpleNamespace:
    """Returns the functions of a rendered source that are not jitted, to run on symbols."""
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    tree = ast.fix_missing_locations(_Choices().visit(ast.Module([*functions], [])))
    count = SimpleNamespace(multi_processor_count=Symbol("multiprocessors"))
    names: dict[str, Any] = {
        "torch": SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda device: count)),
        "triton": SimpleNamespace(cdiv=lambda a, b: (a + b - 1) // b),
        "TensorDescriptor": SymbolicDescriptor,
        "gl": SimpleNamespace(NVMMASharedLayout=lambda *arguments: arguments),
        "min": functools.partial(_extreme, "min"),
        "max": functools.partial(_extreme, "max"),
        "_gcd": lambda a, b: Symbol("gcd", a, b),
        # Part of the program even if nothing uses it.
        "_refuse": lambda test: program.position(Symbol("refuse", test)),
        "_select": _select,
        "_or": lambda first, second: _select(first, lambda: first, second),
    }
    exec(compile(tree, "<plan>", "exec"), names)  # noqa: S102 - our own rendering, which builds run anyway
    return SimpleNamespace(**{node.name: names[node.name] for node in functions})


class _Choices(ast.NodeTransformer):
    """Rewrites code that chooses by a value as calls of functions. Branches are functions too."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return _call("_select", node.test, _later(node.body), _later(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        *first, last = node.values
        for value in reversed(first):
            last = _call("_or", value, _later(last)) if isinstance(node.op, ast.Or) else _both(value, last)
        return last

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return _call("_select", node.operand, _later(ast.Constant(False)), _later(ast.Constant(True)))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(left, [sign], [right])
            for left, sign, right in zip(operands, node.ops, operands[1:], strict=False)
        ]
        *first, last = pairs
        return functools.reduce(lambda after, pair: _both(pair, after), reversed(first), last)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse:
            return ast.Expr(_call("_refuse", node.test))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        match node:
            case ast.While(
                test=ast.Name(id=rest), body=[ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=result), _])])]
            ):
                euclid = f"while {rest}:\n    {result}, {rest} = {rest}, {result} % {rest}"
                if ast.dump(node) == ast.dump(ast.parse(euclid).body[0]):
                    return ast.parse(f"{result}, {rest} = _gcd({result}, {rest}), 0").body[0]
        raise BundleError("a plan has a loop that bundles do not support")


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _later(value: ast.expr) -> ast.expr:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def _both(first: ast.expr, second: ast.expr) -> ast.expr:
    return _call("_select", first, _later(second), _later(ast.Constant(False)))


def _select(test: object, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    if not isinstance(test, Symbol):
        return then() if test else other()
    return Symbol("select", test, then(), other())


def _extreme(name: str, *values: Any) -> Any:
    items = [*values] if len(values) > 1 else [*values[0]]
    if not any(isinstance(item, Symbol) for item in items):
        return getattr(builtins, name)(items)
    return functools.reduce(functools.partial(Symbol, name), items)
