"""Gluon code of score and mask functions, written from their typed expressions alone.

Values that do not depend on keys are computed once for a tile of queries: scalars, and rows [GROUP_M] in
ROW_LAYOUT. Others are computed in functions for one block of keys. A float is kept as a sum there: `pair`
times a factor, plus a coefficient times the distance of the key from `origin`, plus a row. Factors,
coefficients and rows do not depend on keys, so that products with them take no time in blocks.
"""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from flashtune.core.expressions.intervals import UNKNOWN, Interval, intervals
from flashtune.core.expressions.nodes import INT32, Expressions, Functions, Kind, Node, Op
from flashtune.core.features.records import TABLES
from flashtune.templates.common.args.function_lines import HELPERS, Writer
from flashtune.templates.common.args.gluon_words import CALLED

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
_DIVISIONS = (Op.FLOOR_DIVIDE, Op.REMAINDER)
# The coordinates of descriptors are below this one.
ANY_PLACE = Interval(0, 2**30)
# No two places are so far apart.
FARTHEST = 2**29
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
        self.quotients: set[str] = set()
        self.words: dict[int, str] = {}
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

    # The first place of a block, offsets of its places, and their number.
    walk: tuple[str, str, str] = ("n_block * BLOCK_N", "n_offsets", "BLOCK_N")
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
        names = ("functions", "constants", "rows", "score", "mask", "row", "natural", "words")
        self.parts = dict.fromkeys(names, "")
        if functions.score < 0 and functions.mask < 0:
            return
        self.tile: list[str] = []
        self.intervals: dict[int, tuple[int, _Row, _Row] | None] = {}
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
        calling = "\n".join([*definitions, *constants, *self.tile])
        for name, text in reversed([("floor_divide", _HELPERS[Op.FLOOR_DIVIDE]), *CALLED.items()]):
            if f"{name}(" in calling and f"def {name}(" not in calling:
                definitions.insert(1, text)
                calling += text
        self.parts["functions"] = "\n\n".join(text.strip("\n") + "\n" for text in definitions if text)
        self.parts["constants"] = "\n".join(constants)
        self.parts["rows"] = "\n".join(self.tile)

    def pattern(self, place: int) -> str:
        """Returns the text of an operation, with places for its operands."""
        power = self._power(place)
        if power:
            return (
                f"{{0}} >> {power.bit_length() - 1}" if self._is_quotient(place) else f"{{0}} & {power - 1}"
            )
        text = super().pattern(place).replace("tl.", "gl.")
        return text.replace("tanh_of({0})", f"2.0 / (1.0 + gl.exp2({{0}} * {_TANH})) - 1.0")

    def used_helpers(self) -> set[Op]:
        """Returns the operations with a function of their own."""
        nodes = self.functions.nodes
        divided = [place for place, node in enumerate(nodes) if node.op in _DIVISIONS]
        used = super().used_helpers()
        if all(map(self._power, divided)):
            used.discard(Op.FLOOR_DIVIDE)
        if any(map(self._divides_walked, divided)):
            # Their function divides the first place of a block.
            used.add(Op.FLOOR_DIVIDE)
        return used

    def _is_quotient(self, place: int) -> bool:
        return self.functions.nodes[place].op is Op.FLOOR_DIVIDE

    def _power(self, place: int) -> int:
        """Returns the divisor of a division of ints if it is a power of two, else 0."""
        node = self.functions.nodes[place]
        divisor = self.functions.nodes[node.operands[1]] if node.op in _DIVISIONS else node
        is_power = divisor.op is Op.INT and divisor.value > 0 and divisor.value.bit_count() == 1
        return divisor.value if is_power and divisor is not node else 0

    def _divides_walked(self, place: int) -> bool:
        """Returns whether an operation divides the places of a block by a number."""
        node = self.functions.nodes[place]
        if node.op not in _DIVISIONS or self._power(place):
            return False
        first, divisor = node.operands
        return self.functions.nodes[first].op is self.walked and self.forms[divisor] == 0

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
        lines: list[str] = []
        words: list[str] = []
        others: list[str] = []
        conditions = self._conditions(self.functions.mask)
        # Words are of rows.
        has_words = any(self.forms[place] == 3 and self._word(block, place) for place in conditions)
        for place in conditions:
            word = self._word(block, place) if has_words else ""
            (words if word else others).append(word or self._operand(block, place, 3))
        if words:
            self.parts["words"] = "True"
            lines.append(f"s = select_pairs(s, {' & '.join(words)})")
        if others:
            lines.append(f's = gl.where({" & ".join(others)}, s, float("-inf"))')
        lines.append("return s")
        explanation = "Masks the scores of keys that the mask function hides."
        return self._definition("hide_by_function", block, "s", lines, explanation)

    def _conditions(self, place: int) -> list[int]:
        """Returns the bools of which a bool is the conjunction."""
        node = self.functions.nodes[place]
        return (
            [part for own in node.operands for part in self._conditions(own)]
            if node.op is Op.AND
            else [place]
        )

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
        if self._divides_walked(place):
            return self._divided(block, place)
        visible = self._visible(block, place)
        if visible:
            return visible
        operands = [self._operand(block, operand, form) for operand in node.operands]
        if node.op is Op.LOAD:
            for name in (TABLES[node.value], *self._shape_names(node.value)):
                block.inputs[name] = None
            return self.load(place, operands)
        if node.op is Op.DIVIDE and self.forms[node.operands[1]] >= 2:
            return f"{operands[0]} * inverse({operands[1]})"
        return self.pattern(place).format(*operands)

    def _divided(self, block: Block, place: int) -> str:
        """Returns the quotient or the remainder of the places of a block."""
        first, divisor = self.functions.nodes[place].operands
        start, offsets, _ = self.walk
        quotient = f"quotient_{first}_{divisor}"
        if quotient not in block.quotients:
            block.quotients.add(quotient)
            places = f"{start}, {offsets} & 6, {offsets} & -7"
            self._line(block, quotient, f"divide_places({places}, {self._number_of(block, divisor)})")
        if self._is_quotient(place):
            return quotient
        return f"{self._operand(block, first, 2)} - {quotient} * {self._row(divisor).text}"

    def _visible(self, block: Block, place: int) -> str:
        """Returns the text of a comparison of distances of rows with a limit, if it is one."""
        found = self._within(place)
        if found is None:
            return ""
        key, first, last = found
        middle = self._operand(block, key, 3)
        for end in (first, last):
            self._input(block, end)
        return f"({first.wide} <= {middle}) & ({middle} <= {last.wide})"

    def _word(self, block: Block, place: int) -> str:
        """Returns the name of words of which each has a bit for 32 places of a block, or nothing."""
        if place not in block.words:
            lines, inputs, words, tile = [*block.lines], {**block.inputs}, {**block.words}, [*self.tile]
            intervals = {**self.intervals}
            found = self._new_word(block, place)
            if not found:
                # Without the whole, no part of it is needed.
                block.lines, block.inputs, block.words, self.tile = lines, inputs, words, tile
                self.intervals = intervals
            block.words[place] = found
        return block.words[place]

    def _new_word(self, block: Block, place: int) -> str:
        node, kinds = self.functions.nodes[place], self.functions.kinds
        if self.forms[place] < 2 or kinds[place] is not Kind.BOOL:
            return ""
        if node.op in (Op.AND, Op.OR, Op.XOR, Op.NOT):
            words = [self._word(block, operand) for operand in node.operands]
            text = self.pattern(place).format(*words) if node.op is not Op.NOT else f"{words[0]} ^ -1"
            return self._line(block, f"word_{place}", text) if all(words) else ""
        if self._is_periodic(place):
            first, second = (self._at_column(block, place, column) for column in range(2))
            self._line(block, f"even_{place}", f"gl.where({first}, {0x55555555}, 0)")
            return self._line(block, f"word_{place}", f"even_{place} | gl.where({second}, {-0x55555556}, 0)")
        remainders = self._remainders(place)
        if remainders is not None:
            divisor, *own = remainders
            for name, end in zip(("least", "greatest"), own, strict=True):
                self._line(block, name, self._in_word(block, end))
            start, _, width = self.walk
            rest = f"{start}, thread_places, {self._number_of(block, divisor)}, {width}"
            return self._line(block, f"word_{place}", f"places_with(least, greatest, {rest})")
        ends = self._ends(place)
        if ends is None:
            return ""
        start, words = self.walk[0], []
        for end in ends:
            if end.text:
                self._input(block, end)
                words.append(f"places_from({self._in_word(block, end)} - {start} - thread_places)")
        name = self._line(block, f"word_{place}", words[0] if ends[0].text else f"{words[0]} ^ -1")
        if len(words) > 1:
            self._line(block, name, f"{name} & ({words[1]} ^ -1)")
        return name

    def _is_periodic(self, place: int) -> bool:
        """Returns whether a value depends on keys only by their last three bits."""
        if self.forms[place] < 2:
            return True
        if self.functions.kinds[place] is Kind.FLOAT or not self.functions.nodes[place].operands:
            return False
        node = self.functions.nodes[place]
        if node.op is Op.REMAINDER and 0 < self._power(place) <= 8:
            return self._signs(node.operands[0])
        return node.op is not Op.LOAD and all(map(self._is_periodic, node.operands))

    def _in_word(self, block: Block, row: _Row) -> str:
        """Returns a number of rows as an operand of words, [rows, 4]."""
        line = "thread_places = places_of_thread(s)"
        if line not in block.lines:
            block.lines.insert(0, line)
        self._input(block, row)
        return f"of_words({row.text}, s)" if row.form else row.text

    def _remainders(self, place: int) -> tuple[int, _Row, _Row] | None:
        """Returns a divisor, and the least and the greatest remainder of visible places, or None."""
        found, nodes = self._within(place), self.functions.nodes
        if found is not None:
            key, *ends = found
            is_remainder = self._divides_walked(key) and not self._is_quotient(key)
            return (nodes[key].operands[1], ends[0], ends[1]) if is_remainder else None
        node = nodes[place]
        if node.op is not Op.EQUAL:
            return None
        row, key = sorted(node.operands, key=lambda operand: self.forms[operand])
        if self.forms[row] < 2 and self._divides_walked(key) and not self._is_quotient(key):
            return nodes[key].operands[1], self._row(row), self._row(row)
        if (
            nodes[row] != Node(Op.INT)
            or nodes[key].op is not Op.REMAINDER
            or self.forms[nodes[key].operands[1]]
        ):
            return None
        # Differences are multiples of a number if both places have the same remainder.
        distance, divisor = nodes[key].operands
        if nodes[distance].op is Op.ABS:
            distance = nodes[distance].operands[0]
        if not self._signs(distance) or self.bounds[distance] == UNKNOWN:
            return None
        sign, terms = self._coefficients(distance) or (0, [])
        total = self._total([(-sign * own, term) for own, term in terms])
        if total is None or total.form != 1:
            return None
        number = self._row(divisor).text
        same = self._of_tile(f"{{0}} - floor_divide({{0}}, {number}) * {number}", total)
        return divisor, same, same

    def _total(self, terms: list[tuple[int, int]]) -> _Row | None:
        """Returns the sum of terms with signs, or None if it may be beyond int32."""
        if sum(self.bounds[term] == UNKNOWN for _, term in terms) > 1:
            # Each bounded alone, they would have another sum.
            return None
        total, least, greatest = None, 0.0, 0.0
        for own, term in terms:
            row, interval = self._row(term), self.bounds[term]
            if interval == UNKNOWN:
                row = self._of_tile(f"gl.maximum(gl.minimum({{0}}, {FARTHEST}), -{FARTHEST})", row)
                interval = Interval(-FARTHEST, FARTHEST)
            ends = sorted(own * bound for bound in interval)
            least, greatest = least + ends[0], greatest + ends[1]
            if total is None:
                total = row if own > 0 else self._of_tile("-{0}", row)
            else:
                total = self._of_tile("{1} + {0}" if own > 0 else "{1} - {0}", row, total)
        return total if INT32[0] < least and greatest < INT32[-1] else None

    def _tensor_of(self, place: int) -> str:
        """Returns the text of a scalar, which functions take as a tensor."""
        text = self._row(place).text
        return f"gl.to_tensor({text})" if self._is_constant(place) else text

    def _number_of(self, block: Block, divisor: int) -> str:
        """Returns a divisor and its reciprocal as arguments of functions."""
        number, reciprocal = self._row(divisor), _Row(f"reciprocal_{divisor}")
        text = self._tensor_of(divisor)
        line = f"{reciprocal.text} = reciprocal_of({text}, {self.walk[2]})"
        if line not in self.tile:
            self.tile.append(line)
        for own in (number, reciprocal):
            self._input(block, own)
        return f"{text}, {reciprocal.text}"

    def _signs(self, place: int) -> bool:
        """Returns whether an int is a place of a block, plus or minus ints that do not depend on it."""
        found = self._coefficients(place)
        return found is not None and found[0] in (1, -1)

    def _at_column(self, block: Block, place: int, column: int) -> str:
        """Returns the text of a periodic value at the first or the second place of a thread."""
        node = self.functions.nodes[place]
        if self.forms[place] < 2:
            return self._in_word(block, self._row(place))
        if node.op is Op.REMAINDER and self._power(place):
            found = self._coefficients(node.operands[0])
            assert found is not None
            text = f"{'' if found[0] > 0 else '-'}({self.walk[0]} + thread_places + {column})"
            for sign, term in found[1]:
                text += f" {'+' if sign > 0 else '-'} {self._in_word(block, self._row(term))}"
            return f"(({text}) & {self._power(place) - 1})"
        operands = [self._at_column(block, operand, column) for operand in node.operands]
        return f"({self.pattern(place).format(*operands)})"

    def _ends(self, place: int) -> tuple[_Row, _Row] | None:
        """Returns the first visible place of each row and that after the last, if a comparison hides others.

        Either is without text if there is none.
        """
        found, nodes = self._within(place), self.functions.nodes
        if found is not None:
            key, first, last = found
            if nodes[key].op is self.walked:
                return self._place(first), self._place(self._of_tile("gl.minimum({0}, 2147483646) + 1", last))
            if self._divides_walked(key) and self._is_quotient(key):
                ends = [f"{end}_of_{len(self.tile)}" for end in ("first", "after")]
                divisor = self._tensor_of(nodes[key].operands[1])
                self.tile.append(f"{', '.join(ends)} = places_between({first.text}, {last.text}, {divisor})")
                return _Row(ends[0], 1), _Row(ends[1], 1)
            return None
        node = nodes[place]
        if node.op not in (Op.LESS, Op.LESS_EQUAL) or self.functions.kinds[node.operands[0]] is not Kind.INT:
            return None
        left, right = (self._coefficients(operand) for operand in node.operands)
        sign = 0 if left is None or right is None else left[0] - right[0]
        if left is None or right is None or sign not in (1, -1):
            return None
        # The place is at most, or at least, the sum of these terms.
        terms = [(-sign * own, term) for own, term in left[1]] + [
            (sign * own, term) for own, term in right[1]
        ]
        total = self._total(terms)
        if total is None:
            return None
        is_next = (node.op is Op.LESS) != (sign > 0)
        end = self._place(self._of_tile("{0} + 1", total) if is_next else total)
        return (_Row(""), end) if sign > 0 else (end, _Row(""))

    def _place(self, row: _Row) -> _Row:
        """Returns a place of each row, or the nearest that keys may have."""
        return self._of_tile(f"gl.maximum(gl.minimum({{0}}, {ANY_PLACE.greatest}), 0)", row)

    def _within(self, place: int) -> tuple[int, _Row, _Row] | None:
        """Returns a value of keys, its least and its greatest number for each row, or None.

        It does so for a comparison of the size of a distance with a limit. Comparisons with the ends
        of an interval take less time.
        """
        if place in self.intervals:
            return self.intervals[place]
        node, nodes = self.functions.nodes[place], self.functions.nodes
        self.intervals[place] = None
        if (
            node.op not in (Op.LESS, Op.LESS_EQUAL)
            or self.forms[place] < 3
            or self.forms[node.operands[1]] > 1
        ):
            return None
        size = nodes[node.operands[0]]
        difference = nodes[size.operands[0]] if size.op is Op.ABS else size
        if difference is size or difference.op is not Op.SUBTRACT:
            return None
        row, key = sorted(difference.operands, key=lambda operand: self.forms[operand])
        if (self.forms[row], self.forms[key]) != (1, 2) or not self._fits(row, key):
            return None
        limit = self._row(node.operands[1])
        if node.op is Op.LESS:
            # Differences are at least 0: smaller limits are all the same.
            limit = self._of_tile("gl.maximum({0}, 0) - 1", limit)
        greatest = INT32[-1]
        before = f"gl.minimum({{1}}, gl.minimum({{0}}, 0) + {greatest})"
        after = f"gl.minimum({{1}}, {greatest} - gl.maximum({{0}}, 0))"
        ends = [
            self._of_tile(f"{{0}} {sign} gl.maximum({reach}, -1)", self._row(row), limit)
            for sign, reach in (("-", before), ("+", after))
        ]
        self.intervals[place] = (key, ends[0], ends[1])
        return self.intervals[place]

    def _fits(self, row: int, key: int) -> bool:
        """Returns whether the difference of two ints is one that int32 holds."""
        nodes = (self.functions.nodes[row], self.functions.nodes[key])
        if all(node.op is Op.REMAINDER for node in nodes) and nodes[0].operands[1] == nodes[1].operands[1]:
            return True
        # A quotient is at most as large as the dividend.
        ends = [
            place if node.op is not Op.FLOOR_DIVIDE else node.operands[0]
            for place, node in zip((row, key), nodes, strict=True)
        ]
        return max(abs(bound) for place in ends for bound in self.bounds[place]) <= ANY_PLACE.greatest

    def _shape_names(self, table: int) -> list[str]:
        """Returns the names of the sizes and strides of a captured tensor that its loads read."""
        names = [line.split(" = ")[0] for line in self.sizes()]
        return [name for name in names if name.split("_")[1] == str(table)]
