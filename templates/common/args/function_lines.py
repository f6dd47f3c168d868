"""Triton code of score and mask functions, written from their typed expressions alone.

A value that depends on neither queries nor keys is a scalar. One that depends on queries alone is computed
once for a tile of queries. One that depends on keys alone is computed once for a block of keys. Other values
are tiles [BLOCK_M, BLOCK_N], or where keys stay and queries are walked [BLOCK_N, BLOCK_M]. Names of values
begin with their form.
"""

import math
from collections.abc import Mapping

from flashtune.core.expressions.derivative import Derivatives
from flashtune.core.expressions.nodes import LEAVES, Expressions, Kind, Op, float_of
from flashtune.core.features.records import TABLES

# Forms of values, by the sum of 1 if they depend on queries and 2 if they depend on keys.
_FORMS = ("scalar", "row", "key", "pair")
_BROADCAST = ("", "[:, None]", "[None, :]", "")
_TRANSPOSED = ("", "[None, :]", "[:, None]", "")
# Zeros of each form but the first.
_ZEROS = ("", "queries * 0", "key_offsets * 0", "key_offsets[None, :] * 0")
_TRANSPOSED_ZEROS = ("", "queries * 0", "keys * 0", "queries[None, :] * 0")
_CONSTANTS = frozenset({Op.BOOL, Op.INT, Op.FLOAT})
_LEAVES: Mapping[Op, str] = {
    Op.SCORE: "s",
    Op.BATCH: "sequence",
    Op.HEAD: "head",
    Op.QUERY: "tl.minimum(queries, seqlen_q - 1)",
    Op.KEY: "tl.minimum(keys, seqlen_kv - 1)",
}
_PATTERNS: Mapping[Op, str] = {
    Op.TO_FLOAT: "{0}.to(tl.float32)",
    Op.TO_INT: "{0}.to(tl.int32)",
    Op.NEGATE: "-{0}",
    Op.TANH: "tanh_of({0})",
    **{op: f"tl.{op}({{0}})" for op in (Op.ABS, Op.EXP, Op.LOG, Op.SIN, Op.COS, Op.SQRT, Op.ERF)},
    Op.NOT: "{0} == 0",
    Op.ADD: "{0} + {1}",
    Op.SUBTRACT: "{0} - {1}",
    Op.MULTIPLY: "{0} * {1}",
    Op.DIVIDE: "{0} / {1}",
    Op.FLOOR_DIVIDE: "floor_divide({0}, {1})",
    Op.REMAINDER: "{0} - floor_divide({0}, {1}) * {1}",
    Op.MINIMUM: "tl.minimum({0}, {1})",
    Op.MAXIMUM: "tl.maximum({0}, {1})",
    Op.LESS: "{0} < {1}",
    Op.LESS_EQUAL: "{0} <= {1}",
    Op.EQUAL: "{0} == {1}",
    Op.NOT_EQUAL: "{0} != {1}",
    Op.AND: "{0} & {1}",
    Op.OR: "{0} | {1}",
    Op.XOR: "{0} ^ {1}",
    Op.SHIFT_LEFT: "{0} << {1}",
    Op.SHIFT_RIGHT: "{0} >> {1}",
    Op.WHERE: "tl.where({0}, {1}, {2})",
}
# Operations that are rounded to nearest. Usual divisions and roots are approximate, and the compiler adds to
# products before it rounds them.
_EXACT: Mapping[Op, str] = {
    Op.MULTIPLY: "tl.fma({0}, {1}, 0.0)",
    Op.DIVIDE: "tl.div_rn({0}, {1})",
    Op.SQRT: "tl.sqrt_rn({0})",
}
_TYPES = {Kind.BOOL: "tl.int1", Kind.INT: "tl.int32", Kind.FLOAT: "tl.float32"}
HELPERS: Mapping[Op, str] = {
    Op.TANH: '''
@triton.jit
def tanh_of(x):
    """Returns the hyperbolic tangent."""
    # Near zero 1 - 2 / (1 + exp(2x)) has lost the digits that float32 has: there its series.
    square = x * x
    series = 0.021869488536155203 - square * 0.008863235529902197
    series = -0.05396825396825397 + square * series
    series = -0.3333333333333333 + square * (0.13333333333333333 + square * series)
    return tl.where(square < 0.16, x + x * square * series, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E))))
''',
    Op.FLOOR_DIVIDE: '''
@triton.jit
def floor_divide(a, b):
    """Returns a / b, rounded to minus infinity."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest ^ b) < 0), quotient - 1, quotient)
''',
    Op.LOAD: '''
@triton.jit
def place_in(index, size):
    """Returns an index of a dimension: negative ones count from the end, others are within it."""
    return tl.maximum(tl.minimum(tl.where(index < 0, index + size, index), size - 1), 0)
''',
}


def function_lines(
    functions: Expressions,
    part: str,
    *,
    transposed: bool = False,
    by_position: bool = False,
    head_rows: bool = False,
) -> str:
    """Returns lines of code of functions.

    Args:
        functions: The typed expressions.
        part: "helpers" for functions at the top of a file, "rows" for values of a tile of queries, "score"
            for those of a block that the score needs, which changes `s`, and "mask" for the others, which
            make `function_mask`. With derivatives also "slope", which makes `steepness`, the derivative of
            the score, and "sizes" for sizes and strides if `transposed`.
        transposed: Whether tiles are [BLOCK_N, BLOCK_M]. "rows" then has no sizes.
        by_position: Whether a query is its position in the sequence, in place of its index.
        head_rows: Whether the rows of a tile are of several heads.
    """
    writer = Writer(functions, transposed=transposed, by_position=by_position, head_rows=head_rows)
    if part == "helpers":
        return writer.helpers()
    if part == "sizes":
        return "\n".join(writer.sizes())
    if part == "rows":
        places = [place for place in range(len(functions.nodes)) if writer.forms[place] < 2]
        return "\n".join([*([] if transposed else writer.sizes()), *writer.lines(places)])
    slope = functions.slope if isinstance(functions, Derivatives) else -1
    result = {"score": functions.score, "mask": functions.mask, "slope": slope}[part]
    if result < 0:
        # Text of a branch that is removed.
        return "pass"
    written = writer.of_blocks(result, *(() if part == "score" else (functions.score,)))
    value = writer.operand(result, 3)
    if part == "score":
        last = f"s = {value}" if writer.forms[result] == 3 else f"s = {value} + tl.zeros_like(s)"
        # Derivatives are those at the score before the function.
        return "\n".join([*(["unchanged = s"] if writer.keeps_score else []), *written, last])
    return "\n".join([*written, f"{'function_mask' if part == 'mask' else 'steepness'} = {value}"])


class Writer:
    """Names and lines of values. Subclasses write other languages than Triton's."""

    language = "tl"
    leaves = _LEAVES
    # Texts of places as indices of captured tensors, where others than those of `leaves` are.
    existing: Mapping[Op, str] = {}
    types: Mapping[Kind, str] = _TYPES
    # Forms of values that are places or scores, and of which names begin with each form.
    forms_of_leaves: Mapping[Op, int] = {Op.QUERY: 1, Op.KEY: 2, Op.SCORE: 3}
    form_names = _FORMS
    # The text of a query's position in its sequence. It is negative with fewer keys than queries.
    position = "tl.minimum(queries, seqlen_q - 1) + seqlen_kv - seqlen_q"

    def __init__(
        self,
        functions: Expressions,
        *,
        transposed: bool = False,
        by_position: bool = False,
        head_rows: bool = False,
    ) -> None:
        self.functions = functions
        self.exact = functions.compared
        self.by_position = by_position
        if by_position:
            self.leaves = {**self.leaves, Op.QUERY: self.position}
        self.broadcast, self.zeros = (_TRANSPOSED, _TRANSPOSED_ZEROS) if transposed else (_BROADCAST, _ZEROS)
        self.keeps_score = isinstance(functions, Derivatives) and functions.score >= 0
        # For each node, its form.
        self.forms: list[int] = []
        for node in functions.nodes:
            own = self.forms_of_leaves.get(node.op, int(head_rows and node.op is Op.HEAD))
            for operand in node.operands:
                own |= self.forms[operand]
            self.forms.append(own)
        first = functions.count(Op.INT_NUMBER)
        # The place in `function_ints` of the sizes of each table, after which its strides follow.
        self.shapes: list[int] = []
        for table in functions.tables:
            self.shapes.append(first)
            first += 2 * table.dimensions

    def of_blocks(self, result: int, *written: int) -> list[str]:
        """Returns the lines of a block for a value. Those for the values `written` come before."""
        needed = self.functions.needed
        others = {place for earlier in written for place in needed(earlier)}
        return self.lines(
            [place for place in needed(result) if self.forms[place] >= 2 and place not in others]
        )

    def helpers(self, texts: Mapping[Op, str] = HELPERS) -> str:
        """Returns the functions that expressions call."""
        used = self.used_helpers()
        return "\n\n".join(text.strip("\n") + "\n" for op, text in texts.items() if op in used)

    def used_helpers(self) -> set[Op]:
        """Returns the operations with a function of their own."""
        used = {node.op for node in self.functions.nodes}
        if Op.REMAINDER in used:
            used.add(Op.FLOOR_DIVIDE)
        if all(self._is_place(index) for _, _, index in self._indices()):
            used.discard(Op.LOAD)
        return used

    def sizes(self) -> list[str]:
        """Returns the lines that load sizes, where needed, and strides of captured tensors."""
        lines = {}
        for place, axis, index in self._indices():
            dimensions = self.functions.tables[place].dimensions
            if not self._is_place(index):
                size = self.shapes[place] + axis
                lines[f"size_{place}_{axis}"] = f"{self.language}.load(function_ints + {size})"
            stride = self.shapes[place] + dimensions + axis
            lines[f"stride_{place}_{axis}"] = f"{self.language}.load(function_ints + {stride})"
        return [f"{name} = {text}" for name, text in lines.items()]

    def lines(self, places: list[int]) -> list[str]:
        """Returns the lines that compute some nodes."""
        written = [place for place in places if self.functions.nodes[place].op not in (*_CONSTANTS, Op.SCORE)]
        return [f"{self.name(place)} = {self._text(place)}" for place in written]

    def name(self, place: int) -> str:
        """Returns the name of a node's value, or the text of a constant."""
        node = self.functions.nodes[place]
        match node.op:
            case Op.SCORE:
                return "unchanged" if self.keeps_score else "s"
            case Op.BOOL:
                return str(bool(node.value))
            case Op.INT:
                return f"({node.value})" if node.value < 0 else str(node.value)
            case Op.FLOAT:
                number = float_of(node.value)
                return f"({number!r})" if math.isfinite(number) else f'float("{number!r}")'
        return f"{self.form_names[self.forms[place]]}_{place}"

    def operand(self, place: int, form: int) -> str:
        """Returns a node's value as an operand of a value of some form."""
        own, name = self.forms[place], self.name(place)
        is_constant = self.functions.nodes[place].op in _CONSTANTS
        if own == 0 and form and self.functions.kinds[place] is Kind.BOOL and not is_constant:
            # Triton's interpreter does not broadcast scalar bools.
            return f"({name}.to(tl.int32) + {self.zeros[form]} != 0)"
        return name + (self.broadcast[own] if form == 3 else "")

    def _text(self, place: int) -> str:
        node, form = self.functions.nodes[place], self.forms[place]
        if node.op in self.leaves:
            return self.leaves[node.op]
        if node.op is Op.INT_NUMBER:
            return f"{self.language}.load(function_ints + {node.value})"
        if node.op is Op.FLOAT_NUMBER:
            return f"{self.language}.load(function_floats + {node.value})"
        operands = [self.operand(operand, form) for operand in node.operands]
        if node.op is Op.LOAD:
            return self.load(place, operands)
        if operands and all(self.functions.nodes[operand].op in _CONSTANTS for operand in node.operands):
            # Triton's functions take tensors.
            kind = self.functions.kinds[node.operands[0]]
            operands[0] = self.tensor_of(operands[0], kind)
        return self.pattern(place).format(*operands)

    def tensor_of(self, constant: str, kind: Kind) -> str:
        """Returns a constant as a tensor without dimensions."""
        return f"tl.full((), {constant}, {_TYPES[kind]})"

    def pattern(self, place: int) -> str:
        """Returns the text of an operation, with places for its operands."""
        op = self.functions.nodes[place].op
        return (_EXACT if place in self.exact else _PATTERNS).get(op, _PATTERNS[op])

    def load(self, place: int, operands: list[str]) -> str:
        """Returns the text of an element of a captured tensor, from those of its indices."""
        node = self.functions.nodes[place]
        strides = [f" * stride_{node.value}_{axis}" for axis in range(len(operands))]
        offset = "".join(self.offsets(place, operands, strides))
        loaded = f"{self.language}.load({TABLES[node.value]}{offset})"
        kind = self.functions.kinds[place]
        return f"({loaded} != 0)" if kind is Kind.BOOL else f"{loaded}.to({self.types[kind]})"

    def place_text(self, index: int, text: str, size: str) -> str:
        """Returns the text of an index that is within a dimension."""
        del index
        return f"place_in({text}, {size})"

    def offsets(self, place: int, operands: list[str], strides: list[str]) -> list[str]:
        """Returns the summands of an element's offset, from its indices and their factors."""
        node, terms = self.functions.nodes[place], []
        for axis, (index, text) in enumerate(zip(node.operands, operands, strict=True)):
            if self._is_place(index):
                inside = self.existing.get(self.functions.nodes[index].op, "{0}").format(text)
            else:
                inside = self.place_text(index, text, f"size_{node.value}_{axis}")
            terms.append(f" + {inside}{strides[axis]}")
        return terms

    def gradient_place(self, load: int, operands: list[str]) -> str:
        """Returns the pointer to the element of a load in the gradient of its table, from its indices."""
        table, last = self.functions.nodes[load].value, len(operands) - 1
        strides = [f" * numbers_{table}_{axis + 1}" if axis < last else "" for axis in range(len(operands))]
        return "".join([f"gradient_{table}", *self.offsets(load, operands, strides)])

    def numbers(self, table: int) -> list[str]:
        """Returns the lines that count the elements of a table from each axis on."""
        dimensions = self.functions.tables[table].dimensions
        return [
            f"numbers_{table}_{axis} = {self.language}.load(function_ints + {self.shapes[table] + axis})"
            + f" * numbers_{table}_{axis + 1}" * (axis + 1 < dimensions)
            for axis in reversed(range(dimensions))
        ]

    def _is_place(self, index: int) -> bool:
        """Returns whether an index is a place itself, which the call checks against the tensor's size."""
        op = self.functions.nodes[index].op
        if self.by_position and op in (Op.QUERY, Op.KEY):
            return False
        return op in LEAVES - _CONSTANTS - {Op.INT_NUMBER}

    def _indices(self) -> list[tuple[int, int, int]]:
        """Returns the table, the dimension and the node of each index."""
        return [
            (node.value, axis, index)
            for node in self.functions.nodes
            if node.op is Op.LOAD
            for axis, index in enumerate(node.operands)
        ]
