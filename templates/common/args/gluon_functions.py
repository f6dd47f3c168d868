"""Gluon code of score and mask functions, written from their typed expressions alone.

Values that do not depend on keys are computed once for a tile of queries: scalars, and rows [GROUP_M] in
ROW_LAYOUT. Others are computed in functions for one block of keys. A float is kept as a sum there: `pair`
times a factor, plus a coefficient times the distance of the key from `origin`, plus a row. Factors,
coefficients and rows do not depend on keys, so that products with them take no time in blocks.
"""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from flashtune.core.expressions.intervals import Interval, intervals
from flashtune.core.expressions.nodes import INT32, Expressions, Functions, Kind, Op
from flashtune.core.features.records import TABLES
from flashtune.templates.common.args.function_lines import HELPERS, Writer

_TYPES = {Kind.BOOL: "gl.int1", Kind.INT: "gl.int32", Kind.FLOAT: "gl.float32"}
_LEAVES: Mapping[Op, str] = {
    Op.SCORE: "s",
    Op.BATCH: "this.batch",
    Op.HEAD: "this.kv_head * scheduler.group_size + this.head",
    Op.QUERY: "positions",
    Op.KEY: "n_block * BLOCK_N + (n_offsets & 6) + (n_offsets & -7)",
}
# Indices of captured tensors that are places. Rows and columns beyond the last one are not read.
_EXISTING: Mapping[Op, str] = {
    Op.QUERY: "gl.minimum({0}, seqlen_q - 1)",
    Op.KEY: "gl.minimum({0}, seqlen_kv - 1)",
}
_HELPERS: Mapping[Op, str] = {
    Op.DIVIDE: '''
@gluon.jit
def inverse(numbers):
    """Returns the reciprocals of numbers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [numbers], gl.float32, True, 1)
''',
    Op.TANH: '''
@gluon.jit
def logistic(x):
    """Returns 1 / (1 + exp2(x)), with an error relative to 1."""
    return reciprocals(gl.exp2(gl.minimum(x, MAX_EXPONENT)) + 1.0)
''',
    **{
        op: HELPERS[op].replace("@triton.", "@gluon.").replace("tl.", "gl.")
        for op in (Op.FLOOR_DIVIDE, Op.LOAD)
    },
}
# The coordinates of descriptors are below this one.
ANY_PLACE = Interval(0, 2**30)
LARGEST_FLOAT = 2.0**127
_LOG2_E = "1.4426950408889634"
_TANH = "-2.8853900817779268"


class _Row(NamedTuple):
    """A float that does not depend on keys: its text, and its form, 0 for a scalar and 1 for rows."""

    text: str
    form: int = 0

    @property
    def wide(self) -> str:
        return self.text + "[:, None]" * self.form


class _Sum(NamedTuple):
    """`pair` times `factor`, plus `slope` times the distance from `origin`, plus `row`."""

    pair: str = ""
    factor: _Row | None = None
    slope: _Row | None = None
    row: _Row | None = None
    # Whether a product may be that of each part, because no part is much larger than the sum.
    is_exact: bool = False
    # Whether the pair consists of multiples of the score, of hyperbolic tangents and of distances.
    is_bounded: bool = False


def gluon_function_lines(
    functions: Functions, part: str, by_position: bool = False, packed: bool = False
) -> str:
    """Returns lines of code of functions.

    Args:
        functions: The typed expressions.
        part: "functions" for functions at the top of a file, "constants" for values of a launch, "rows" for
            those of a tile of queries, "score" and "mask" for the further arguments of `change_scores` and
            `hide_by_function`, and "row" for the term of scores that depends on rows alone, or nothing.
            "natural" is nothing if changed scores are in units of log2. Others are in natural units, because
            captured values may be so large that products with LOG2_E are infinite.
        by_position: Whether a query is its position in the sequence, in place of its index.
        packed: Whether queries are packed.
    """
    writer = GluonWriter(functions, by_position=by_position, packed=packed)
    return writer.parts[part]


_SCORE = _Sum("s", _Row("score_scale"), is_bounded=True)


def _bare(text: str) -> str:
    """Returns an expression without parentheses around all of it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth and place < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


class Block:
    """The lines of one function for a block of keys."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sums: dict[int, _Sum | None] = {}
        self.names: dict[int, str] = {}
        self.measures_distance = False
        # Values of a tile or launch that the lines read, in order.
        self.inputs: dict[str, None] = {}


class GluonWriter(Writer):
    """Writes functions for blocks of keys. Of a subclass, blocks are of queries, and a program holds keys."""

    language, leaves, existing, types = "gl", _LEAVES, _EXISTING, _TYPES
    # The place of blocks, the arguments of their functions before those of a tile, and names of their values.
    walked = Op.KEY
    arguments: tuple[str, ...] = ("n_block", "n_offsets", "seqlen_q", "seqlen_kv", "origin")
    prefixes = ("", "", "key", "pair")
    # Distances from `origin` of the columns that a thread computes, which differ by constants.
    distances = (
        "steps = (n_offsets & -7).to(gl.float32)",
        "start = (n_block * BLOCK_N - origin + (n_offsets & 6)).to(gl.float32)",
    )

    position = "positions + this.seqlen_kv - this.seqlen_q"

    def __init__(self, functions: Expressions, *, by_position: bool = False, packed: bool = False) -> None:
        super().__init__(functions, by_position=by_position)
        if packed:
            self.leaves = {**self.leaves, Op.HEAD: "this.head"}
        places = dict.fromkeys((Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY), ANY_PLACE)
        if by_position:
            # Sequences may have fewer keys than queries.
            places[Op.QUERY] = Interval(-ANY_PLACE.greatest, ANY_PLACE.greatest)
        self.bounds = intervals(functions, places)
        self.parts = dict.fromkeys(("functions", "constants", "rows", "score", "mask", "row", "natural"), "")
        if functions.score < 0 and functions.mask < 0:
            return
        self.tile: list[str] = []
        constants = self.sizes()
        for place, form in enumerate(self.forms):
            if form < 2:
                own = self.lines([place])
                if self._is_of_launch(place):
                    constants += own
                else:
                    self.tile += own
        definitions = [self.helpers(_HELPERS)]
        if functions.score >= 0:
            block = Block()
            definitions.append(self._score_function(block))
            self.parts["score"] = ", ".join(block.inputs)
        if functions.mask >= 0:
            block = Block()
            definitions.append(self._mask_function(block))
            self.parts["mask"] = ", ".join(block.inputs)
        definitions += self._further_functions()
        self.parts["functions"] = "\n\n".join(text.strip("\n") + "\n" for text in definitions if text)
        self.parts["constants"] = "\n".join(constants)
        self.parts["rows"] = "\n".join(self.tile)

    def pattern(self, op: Op) -> str:
        """Returns the text of an operation, with places for its operands."""
        text = super().pattern(op).replace("tl.", "gl.")
        return text.replace("tanh_of({0})", f"2.0 / (1.0 + gl.exp2({{0}} * {_TANH})) - 1.0")

    def operand(self, place: int, form: int) -> str:
        """Returns a node's value as an operand of a value of a tile. `_operand` returns those of blocks."""
        del form
        return self.name(place)

    def place_text(self, index: int, text: str, size: str) -> str:
        """Returns the text of an index that is within a dimension."""
        needed = [self.bounds[place] for place in self.functions.needed(index)]
        fits = all(INT32[0] <= bound.least and bound.greatest <= INT32[-1] for bound in needed)
        if fits and self.bounds[index].least >= 0:
            return f"gl.minimum({text}, {size} - 1)"
        return super().place_text(index, text, size)

    def tensor_of(self, constant: str, kind: Kind) -> str:
        """Returns a constant as a tensor without dimensions."""
        del kind
        return f"gl.to_tensor({constant})"

    # ---- tiles

    def _is_of_launch(self, place: int) -> bool:
        """Returns whether a value is the same for all tiles."""
        places = {Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY, Op.SCORE}
        return not any(self.functions.nodes[needed].op in places for needed in self.functions.needed(place))

    def _of_tile(self, text: str, *rows: _Row) -> _Row:
        """Returns a new value of a tile, from others."""
        form = max(row.form for row in rows)
        name = f"{('scalar', 'row')[form]}_of_{len(self.tile)}"
        self.tile.append(f"{name} = {text.format(*(row.text for row in rows))}")
        return _Row(name, form)

    def _product(self, first: _Row | None, other: _Row | None) -> _Row | None:
        if first is None or other is None:
            return first or other
        return self._of_tile("{0} * {1}", first, other)

    def _plus(self, first: _Row | None, other: _Row | None) -> _Row | None:
        if first is None or other is None:
            return first or other
        return self._of_tile("{0} + {1}", first, other)

    # ---- blocks

    def _further_functions(self) -> list[str]:
        """Returns definitions of functions other than those of all kernels."""
        return []

    def _score_function(self, block: Block) -> str:
        functions = self.functions
        changed = self._sum(block, functions.score)
        if changed.row is not None and changed.pair:
            # The same term for all keys of a row does not change their weights.
            self.parts["row"] = changed.row.text
            changed = changed._replace(row=None)
        if changed.is_bounded:
            changed = self._scaled(block, changed, _Row(_LOG2_E), is_exact=True)
        else:
            self.parts["natural"] = "True"
        lines = [f"s = {self._of_pairs(block, changed)}", "return s"]
        return self._definition(
            "change_scores", block, "s", lines, "Returns scores after the score function."
        )

    def _of_pairs(self, block: Block, changed: _Sum) -> str:
        """Returns the text of changed scores, which have the shape of a tile."""
        text = _bare(self._text_of(block, changed, 3))
        score = self.functions.score
        if self.forms[score] < 3 or not self.depends_on_score(score):
            text = f"{text} + gl.zeros_like(s)"
        return text

    def depends_on_score(self, place: int) -> bool:
        """Returns whether a value depends on the score."""
        return any(self.functions.nodes[needed].op is Op.SCORE for needed in self.functions.needed(place))

    def _mask_function(self, block: Block) -> str:
        visible = self._operand(block, self.functions.mask, 3)
        lines = [f's = gl.where({visible}, s, float("-inf"))', "return s"]
        explanation = "Masks the scores of keys that the mask function hides."
        return self._definition("hide_by_function", block, "s", lines, explanation)

    def _definition(self, name: str, block: Block, tile: str, last: list[str], explanation: str) -> str:
        """Returns the definition of a function of a tile of this name, with these last lines."""
        lines = [*block.lines, *last]
        inputs = ", ".join((tile, *self.arguments, *block.inputs))
        header = f"@gluon.jit\ndef {name}({inputs}):"
        if len(inputs) > 80:
            header = f"@gluon.jit\ndef {name}(\n    {textwrap.fill(inputs, 100)},\n):".replace(
                ",\n", ",\n    "
            )
            header = header.replace("    ):", "):")
        body = "\n".join(f"    {line}" for line in (f'"""{explanation}"""', *lines))
        return f"{header}\n{body}\n"

    def _line(self, block: Block, name: str, text: str) -> str:
        block.lines.append(f"{name} = {_bare(text)}")
        return name

    def _input(self, block: Block, row: _Row) -> _Row:
        if row.text.isidentifier() and row.text not in ("True", "False"):
            block.inputs[row.text] = None
        return row

    def _row(self, place: int) -> _Row:
        """Returns the value of a tile."""
        return _Row(self.name(place), 0 if self._is_constant(place) else self.forms[place])

    def _is_constant(self, place: int) -> bool:
        return self.functions.nodes[place].op in (Op.BOOL, Op.INT, Op.FLOAT)

    def _sum(self, block: Block, place: int) -> _Sum:
        """Returns a float as a sum."""
        return self._parts(block, place) or _Sum(self._operand(block, place, 3))

    def _parts(self, block: Block, place: int) -> _Sum | None:
        """Returns the sum that an operation makes of its operands, or None."""
        if place not in block.sums:
            block.sums[place] = self._new_parts(block, place)
        return block.sums[place]

    def _new_parts(self, block: Block, place: int) -> _Sum | None:
        if self.forms[place] < 2:
            return _Sum(row=self._row(place))
        node = self.functions.nodes[place]
        if self.forms[place] == 2 and not self._is_distance(block, place):
            return None
        match node.op:
            case Op.SCORE:
                return _SCORE
            case Op.TO_FLOAT:
                return self._converted(block, node.operands[0])
            case Op.NEGATE:
                return self._scaled(block, self._sum(block, node.operands[0]), _Row("-1.0"), is_exact=True)
            case Op.ADD | Op.SUBTRACT:
                first, other = (self._sum(block, operand) for operand in node.operands)
                if node.op is Op.SUBTRACT:
                    other = self._scaled(block, other, _Row("-1.0"), is_exact=True)
                return self._added(block, first, other)
            case Op.MULTIPLY | Op.DIVIDE:
                return self._multiplied(block, place)
            case Op.TANH if self.forms[place] == 3:
                x = self._scaled(block, self._sum(block, node.operands[0]), _Row(_TANH))
                own = self._line(block, f"half_{place}", f"logistic{self._text_of(block, x, 3)}")
                return _Sum(own, _Row("2.0"), None, _Row("-1.0"), is_exact=True, is_bounded=True)
        return None

    def _is_distance(self, block: Block, place: int) -> bool:
        """Returns whether a value of keys is a distance, or a sum or product of some and of other numbers."""
        node = self.functions.nodes[place]
        if node.op is Op.TO_FLOAT:
            return True
        wide = [operand for operand in node.operands if self.forms[operand] == 2]
        sums = [
            self._parts(block, operand) for operand in wide if self.functions.kinds[operand] is Kind.FLOAT
        ]
        is_scaled = node.op in (Op.MULTIPLY, Op.DIVIDE)
        return len(sums) == len(wide) and all(
            own is not None and not own.pair and (own.is_exact or not is_scaled) for own in sums
        )

    def _converted(self, block: Block, place: int) -> _Sum | None:
        """Returns the float of an int, if it is a distance of a query and a key."""
        node = self.functions.nodes[place]
        if node.op is not Op.ABS:
            return self._affine(place)
        distance = self._affine(node.operands[0]) if self.forms[place] == 3 else None
        return distance and _Sum(f"gl.abs{self._text_of(block, distance, 3)}", is_bounded=True)

    def _multiplied(self, block: Block, place: int) -> _Sum | None:
        """Returns a product with, or a quotient by, a number that does not depend on keys."""
        node = self.functions.nodes[place]
        first, other = node.operands
        if node.op is Op.MULTIPLY and self.forms[other] >= 2:
            first, other = other, first
        if self.forms[other] >= 2:
            return None
        row = self._row(other)
        if node.op is Op.DIVIDE:
            row = self._of_tile("1.0 / {0}", row)
        return self._scaled(block, self._sum(block, first), row)

    def _affine(self, place: int) -> _Sum | None:
        """Returns the float of an int that is a key, plus or minus an int that does not depend on keys."""
        found = self._coefficients(place)
        if found is None or found[0] not in (1, -1):
            return None
        sign, terms = found
        origin = "origin" if sign > 0 else "-origin"
        text = " ".join([origin, *(f"{'+' if own > 0 else '-'} {self.name(term)}" for own, term in terms)])
        form = max((self.forms[term] for _, term in terms), default=0)
        row = _Row(f"{('scalar', 'row')[form]}_of_{len(self.tile)}", form)
        self.tile.append(f"{row.text} = ({text}).to(gl.float32)")
        return _Sum("", None, _Row(f"{sign}.0"), row, is_exact=True)

    def _coefficients(self, place: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Returns the coefficient of the key, and other terms with their signs."""
        node = self.functions.nodes[place]
        if self.forms[place] < 2:
            return 0, [(1, place)]
        if node.op is self.walked:
            return 1, []
        if node.op not in (Op.ADD, Op.SUBTRACT, Op.NEGATE):
            return None
        keys, terms = 0, []
        signs = {Op.NEGATE: (-1,), Op.ADD: (1, 1), Op.SUBTRACT: (1, -1)}[node.op]
        for operand, sign in zip(node.operands, signs, strict=True):
            found = self._coefficients(operand)
            if found is None:
                return None
            keys += sign * found[0]
            terms += [(sign * own, term) for own, term in found[1]]
        return keys, terms

    def _scaled(self, block: Block, value: _Sum, by: _Row, *, is_exact: bool = False) -> _Sum:
        """Returns a sum times a number that does not depend on keys."""
        parts = sum(bool(part) for part in (value.pair, value.slope, value.row))
        if parts > 1 and not (value.is_exact or is_exact):
            whole = self._line(block, f"sum_{len(block.lines)}", self._text_of(block, value, 3))
            value = _Sum(whole, is_bounded=value.is_bounded)
        factor, slope, row = (self._times(part, by) for part in (value.factor, value.slope, value.row))
        return _Sum(
            value.pair, (factor or by) if value.pair else None, slope, row, value.is_exact, value.is_bounded
        )

    def _times(self, part: _Row | None, by: _Row) -> _Row | None:
        if part is None:
            return None
        numbers = [self._number(text) for text in (part.text, by.text)]
        product = None if None in numbers else numbers[0] * numbers[1]  # type: ignore[operator]
        # Larger ones are computed in the kernel, where they are infinite.
        if product is not None and abs(product) <= LARGEST_FLOAT:
            return _Row(repr(product))
        if numbers[0] == 1.0:
            return by
        if numbers[1] == 1.0:
            return part
        return self._product(part, by)

    @staticmethod
    def _number(text: str) -> float | None:
        try:
            return float(text.strip("()"))
        except ValueError:
            return None

    def _added(self, block: Block, first: _Sum, other: _Sum) -> _Sum:
        """Returns the sum of two sums."""
        pair, factor = first.pair or other.pair, first.factor if first.pair else other.factor
        if first.pair and other.pair:
            left, right = (self._text_of(block, _Sum(own.pair, own.factor), 3) for own in (first, other))
            pair, factor = self._line(block, f"sum_{len(block.lines)}", f"{left} + {right}"), None
        return _Sum(
            pair,
            factor,
            self._plus(first.slope, other.slope),
            self._plus(first.row, other.row),
            first.is_exact and other.is_exact and not (first.pair and other.pair),
            all(own.is_bounded or not own.pair for own in (first, other)),
        )

    def _text_of(self, block: Block, value: _Sum, form: int) -> str:
        """Returns the text of a sum, [GROUP_M, BLOCK_N], or [BLOCK_N] with form 2."""

        def wide(row: _Row) -> str:
            return row.wide if form == 3 else row.text

        for part in value[1:4]:
            if isinstance(part, _Row):
                self._input(block, part)
        text = ""
        if value.slope is not None:
            if not block.measures_distance:
                block.lines += self.distances
                block.measures_distance = True
            added, slope = "[None, :]" * (form == 3), wide(value.slope)
            text = f"gl.fma(steps{added}, {slope}, {slope} * start{added})"
        if value.pair:
            own = value.pair
            if value.factor is None:
                text = f"{own} + {text}" if text else own
            else:
                text = (
                    f"gl.fma({own}, {wide(value.factor)}, {text})"
                    if text
                    else f"{own} * {wide(value.factor)}"
                )
        if value.row is not None:
            text = f"{text} + {wide(value.row)}" if text else wide(value.row)
        return f"({text})"

    def _operand(self, block: Block, place: int, form: int) -> str:
        """Returns a value as an operand of a value of some form."""
        own = self.forms[place]
        if own < 2:
            row = self._row(place)
            self._input(block, row)
            return row.text + "[:, None]" * (own == 1 and form == 3)
        if place not in block.names:
            parts = self._parts(block, place) if self.functions.kinds[place] is Kind.FLOAT else None
            text = self._computed(block, place) if parts is None else self._text_of(block, parts, own)
            block.names[place] = self._line(block, f"{self.prefixes[own]}_{place}", text)
        return block.names[place] + "[None, :]" * (own == 2 and form == 3)

    def _computed(self, block: Block, place: int) -> str:
        node, form = self.functions.nodes[place], self.forms[place]
        if node.op is self.walked:
            return self.leaves[node.op]
        operands = [self._operand(block, operand, form) for operand in node.operands]
        if node.op is Op.LOAD:
            for name in (TABLES[node.value], *self._shape_names(node.value)):
                block.inputs[name] = None
            return self.load(place, operands)
        if node.op is Op.DIVIDE and self.forms[node.operands[1]] >= 2:
            return f"{operands[0]} * inverse({operands[1]})"
        return self.pattern(node.op).format(*operands)

    def _shape_names(self, table: int) -> list[str]:
        """Returns the names of the sizes and strides of a captured tensor that its loads read."""
        names = [line.split(" = ")[0] for line in self.sizes()]
        return [name for name in names if name.split("_")[1] == str(table)]
