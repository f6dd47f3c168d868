"""`Functions`: a score function and a mask function as typed expressions of a closed list of operations.

The nodes of both are in one list, in which operands come before the nodes that use them. Records hold ints
and enums only. They are decoded from tables of any origin, so each one is checked when it is made.

The module imports no torch, so that commands without a GPU start fast.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from flashtune.core.errors import ProblemError

MAX_NODES, MAX_DEPTH = 512, 64
# Captured tensors are extra inputs of a call, of which there is a fixed number.
MAX_TABLES = 6
MAX_DIMENSIONS = 4
MAX_NUMBERS = 16
INT32 = range(-(2**31), 2**31)
# The largest count of a shift, in bits.
MAX_SHIFT = 31


class Kind(enum.StrEnum):
    """The type of a node's value."""

    BOOL = "bool"
    INT = "int32"
    FLOAT = "float32"


class Op(enum.StrEnum):
    """An operation of a node.

    `int_number` and `float_number` are captured numbers, `load` reads a captured tensor. `divide` is of
    floats. `floor_divide` and `remainder` are of ints and round to minus infinity, as in Python. `and` and
    `or` are of bools, or of the bits of ints as `xor` and shifts are. Shifts are by 0 to 31 bits.
    """

    SCORE = "score"
    BATCH = "batch"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    INT_NUMBER = "int_number"
    FLOAT_NUMBER = "float_number"
    LOAD = "load"
    TO_FLOAT = "to_float"
    TO_INT = "to_int"
    NEGATE = "negate"
    ABS = "abs"
    TANH = "tanh"
    EXP = "exp"
    LOG = "log"
    SIN = "sin"
    COS = "cos"
    SQRT = "sqrt"
    ERF = "erf"
    NOT = "not"
    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    DIVIDE = "divide"
    FLOOR_DIVIDE = "floor_divide"
    REMAINDER = "remainder"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    LESS = "less"
    LESS_EQUAL = "less_equal"
    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHIFT_LEFT = "shift_left"
    SHIFT_RIGHT = "shift_right"
    WHERE = "where"


# Operations with a result that changes at single numbers of a float operand.
STEPS = (Op.LESS, Op.LESS_EQUAL, Op.EQUAL, Op.NOT_EQUAL, Op.TO_INT)


class TableDtype(enum.StrEnum):
    """Element types of captured tensors."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def kind(self) -> Kind:
        """The type of a loaded element. Elements of int64 become int32."""
        names = {TableDtype.BOOL: Kind.BOOL, TableDtype.INT32: Kind.INT, TableDtype.INT64: Kind.INT}
        return names.get(self, Kind.FLOAT)


class Table(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    array_like=True,
    omit_defaults=True,
    # The order of operands depends on the text of tables.
    repr_omit_defaults=True,
):
    """A captured tensor: its element type and its number of dimensions."""

    dtype: TableDtype
    dimensions: int
    has_gradient: bool = False  # Whether a backward pass computes its gradient. False in forward passes.


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, omit_defaults=True):
    """One operation and its operands, by their places in the list of nodes.

    `value` is the constant of `bool` and `int`, and the bits of a float32 of `float`. It is the place of a
    captured number or of a table among those of its kind.
    """

    op: Op
    operands: tuple[int, ...] = ()
    value: int = 0


class Rule(NamedTuple):
    """The types of an operation's operands and result. None is one of `kinds`, the same for all."""

    operands: tuple[Kind | None, ...]
    result: Kind | None
    kinds: tuple[Kind, ...] = (Kind.INT, Kind.FLOAT)
    commutes: bool = False  # Whether two operands can change places with the same result.


_B, _I, _F = Kind.BOOL, Kind.INT, Kind.FLOAT
_ANY = (Kind.BOOL, Kind.INT, Kind.FLOAT)
_PAIR = Rule((None, None), None)
_COMPARISON = Rule((None, None), _B)
RULES: Mapping[Op, Rule] = {
    Op.SCORE: Rule((), _F),
    **dict.fromkeys((Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY, Op.INT, Op.INT_NUMBER), Rule((), _I)),
    Op.BOOL: Rule((), _B),
    **dict.fromkeys((Op.FLOAT, Op.FLOAT_NUMBER), Rule((), _F)),
    Op.TO_FLOAT: Rule((None,), _F, (_B, _I)),
    Op.TO_INT: Rule((None,), _I, (_B, _F)),
    **dict.fromkeys((Op.NEGATE, Op.ABS), Rule((None,), None)),
    **dict.fromkeys((Op.TANH, Op.EXP, Op.LOG, Op.SIN, Op.COS, Op.SQRT, Op.ERF), Rule((_F,), _F)),
    Op.NOT: Rule((_B,), _B),
    **dict.fromkeys((Op.ADD, Op.MULTIPLY, Op.MINIMUM, Op.MAXIMUM), _PAIR._replace(commutes=True)),
    Op.SUBTRACT: _PAIR,
    Op.DIVIDE: Rule((_F, _F), _F),
    **dict.fromkeys((Op.FLOOR_DIVIDE, Op.REMAINDER, Op.SHIFT_LEFT, Op.SHIFT_RIGHT), Rule((_I, _I), _I)),
    Op.XOR: Rule((_I, _I), _I, commutes=True),
    **dict.fromkeys((Op.LESS, Op.LESS_EQUAL), _COMPARISON),
    **dict.fromkeys((Op.EQUAL, Op.NOT_EQUAL), Rule((None, None), _B, _ANY, commutes=True)),
    **dict.fromkeys((Op.AND, Op.OR), Rule((None, None), None, (_B, _I), commutes=True)),
    Op.WHERE: Rule((_B, None, None), None, _ANY),
}
LEAVES = frozenset(op for op, rule in RULES.items() if not rule.operands)
NUMBERS = (Op.INT_NUMBER, Op.FLOAT_NUMBER)


class Expressions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Operations and their results. Captured values are inputs of the call.

    Attributes:
        nodes: All operations, operands first.
        score: The place of the changed score, or -1 if scores stay as they are.
        mask: The place of the visibility, or -1 if the functions hide no key.
        tables: The captured tensors.
    """

    nodes: tuple[Node, ...] = ()
    score: int = -1
    mask: int = -1
    tables: tuple[Table, ...] = ()

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The type of each node."""
        return kinds_of(self.nodes, self.tables)

    def count(self, op: Op) -> int:
        """Returns the number of captured numbers of one operation, `int_number` or `float_number`."""
        return 1 + max((node.value for node in self.nodes if node.op is op), default=-1)

    @property
    def has_floats(self) -> bool:
        """Whether a captured number is a float."""
        return self.count(Op.FLOAT_NUMBER) > 0

    def needed(self, place: int) -> list[int]:
        """Returns the places of a node and of all nodes that it depends on, in ascending order."""
        return needed_by(self.nodes, place)

    @functools.cached_property
    def of_score(self) -> frozenset[int]:
        """The places of the score and of all nodes that depend on it."""
        found: set[int] = set()
        for place, node in enumerate(self.nodes):
            if node.op is Op.SCORE or not found.isdisjoint(node.operands):
                found.add(place)
        return frozenset(found)

    @property
    def select_by_score(self) -> bool:
        """Whether an index of a captured tensor depends on the score."""
        return any(node.op is Op.LOAD and not self.of_score.isdisjoint(node.operands) for node in self.nodes)

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Comparisons of floats and conversions to ints: those that depend on the score, and the others."""
        found: tuple[list[int], list[int]] = [], []
        for place, node in enumerate(self.nodes):
            if node.op in STEPS and self.kinds[node.operands[0]] is Kind.FLOAT:
                found[place not in self.of_score].append(place)
        return tuple(found[0]), tuple(found[1])

    @functools.cached_property
    def compared(self) -> frozenset[int]:
        """The floats that determine `steps` without the score.

        Equal operands must give equal floats, so that kernels compute each operation alone and round it once.
        """
        needed = needed_by(self.nodes, -1, *self.steps[1])
        return frozenset(place for place in needed if self.kinds[place] is Kind.FLOAT)

    @property
    def trained(self) -> list[int]:
        """The captured tensors of which a backward pass computes the gradient."""
        return [place for place, table in enumerate(self.tables) if table.has_gradient]


class Functions(Expressions, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The score and mask functions of a problem."""

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES or len(self.tables) > MAX_TABLES:
            raise ProblemError(
                f"score and mask functions have {len(self.nodes)} operations and {len(self.tables)} captured "
                f"tensors: kernels take {MAX_NODES} and {MAX_TABLES}"
            )
        for table in self.tables:
            if table.has_gradient and table.dtype.kind is not Kind.FLOAT:
                raise ProblemError(f"a captured tensor of {table.dtype} has a gradient: pass one of floats")
            if not 0 <= table.dimensions <= MAX_DIMENSIONS:
                raise ProblemError(
                    f"a captured tensor has {table.dimensions} dimensions: pass up to {MAX_DIMENSIONS}"
                )
        depths: list[int] = []
        for place, node in enumerate(self.nodes):
            if not all(0 <= operand < place for operand in node.operands):
                raise ProblemError("an operand of a score or mask function is not an earlier operation")
            depths.append(1 + max((depths[operand] for operand in node.operands), default=0))
            _check_value(node, self.tables)
        if max(depths, default=0) > MAX_DEPTH:
            raise ProblemError(
                f"score and mask functions are {max(depths)} operations deep: kernels take {MAX_DEPTH}"
            )
        kinds = kinds_of(self.nodes, self.tables)
        for place, kind in ((self.score, Kind.FLOAT), (self.mask, Kind.BOOL)):
            if not -1 <= place < len(self.nodes) or (place >= 0 and kinds[place] is not kind):
                raise ProblemError("a score function gives no float32, or a mask function no bool")
        if self.mask >= 0 and any(self.nodes[place].op is Op.SCORE for place in self.needed(self.mask)):
            raise ProblemError("a mask function depends on the score")
        if len(needed_by(self.nodes, self.score, self.mask)) != len(self.nodes):
            raise ProblemError("a score or mask function has unused operations")

    def __hash__(self) -> int:
        # Problems are hashed in look-ups, and all nodes take long.
        return hash(self.digest)

    def __bool__(self) -> bool:
        return bool(self.nodes)

    def with_gradients(self, tables: Collection[int]) -> Functions:
        """Returns the functions of a pass that computes the gradients of these captured tensors alone."""
        if set(tables) == set(self.trained):
            return self
        own = tuple(
            Table(table.dtype, table.dimensions, place in tables) for place, table in enumerate(self.tables)
        )
        return Functions(self.nodes, self.score, self.mask, own)

    @functools.cached_property
    def digest(self) -> str:
        """The hash of both functions, 16 hex digits. Equal canonical forms have equal hashes."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def needed_by(nodes: Sequence[Node], *roots: int) -> list[int]:
    """Returns the places of some nodes and of all that they depend on, in ascending order. -1 is none."""
    found = {root for root in roots if root >= 0}
    for place in range(max(roots), -1, -1):
        if place in found:
            found.update(nodes[place].operands)
    return sorted(found)


def kinds_of(nodes: Sequence[Node], tables: Sequence[Table]) -> tuple[Kind, ...]:
    """Returns the type of each node, and raises a `ProblemError` if operands have others."""
    kinds: list[Kind] = []
    for node in nodes:
        kinds.append(kind_of(node, [kinds[operand] for operand in node.operands], tables))
    return tuple(kinds)


def kind_of(node: Node, operands: Sequence[Kind], tables: Sequence[Table]) -> Kind:
    """Returns the type of a node from those of its operands, or raises a `ProblemError`."""
    if node.op is Op.LOAD:
        table = tables[node.value]
        if len(operands) != table.dimensions or any(kind is not Kind.INT for kind in operands):
            raise ProblemError("a captured tensor is indexed by other than one int32 for each dimension")
        return table.dtype.kind
    rule = RULES[node.op]
    free = {kind for kind, wanted in zip(operands, rule.operands, strict=False) if wanted is None}
    fits = (
        len(operands) == len(rule.operands)
        and len(free) <= 1
        and free <= set(rule.kinds)
        and all(wanted in (None, kind) for kind, wanted in zip(operands, rule.operands, strict=True))
    )
    if not fits:
        raise ProblemError(f"the operation {node.op} is not defined for {', '.join(operands) or 'nothing'}")
    return rule.result or free.pop()


def float_bits(number: float) -> int:
    """Returns the bits of the float32 nearest to a number, as an unsigned int."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    except OverflowError:
        return float_bits(float("inf") if number > 0 else float("-inf"))


# The score of a hidden key.
MINUS_INFINITY = Node(Op.FLOAT, (), float_bits(float("-inf")))


def float_of(bits: int) -> float:
    """Returns the float32 of some bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _check_value(node: Node, tables: Sequence[Table]) -> None:
    bounds = {
        Op.BOOL: range(2),
        Op.INT: INT32,
        Op.FLOAT: range(2**32),
        Op.INT_NUMBER: range(MAX_NUMBERS),
        Op.FLOAT_NUMBER: range(MAX_NUMBERS),
        Op.LOAD: range(len(tables)),
    }
    if node.value not in bounds.get(node.op, range(1)):
        raise ProblemError(f"the value {node.value} of the operation {node.op} is out of range")


NO_FUNCTIONS = Functions()
