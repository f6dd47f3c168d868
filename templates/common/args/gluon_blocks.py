"""Values of one block of places in Gluon: floats as sums of which the parts do not depend on the places.

A sum is `pair` times a factor, plus a coefficient times the distance of the place from `origin`, plus a row.
Factors, coefficients and rows are values of a tile, so that products with them take no time in blocks.
"""

from typing import NamedTuple

from flashtune.core.expressions.nodes import Kind, Op
from flashtune.core.features.records import TABLES
from flashtune.templates.common.args.gluon_places import TANH, PlaceWriter, Row

LARGEST_FLOAT = 2.0**127


class Sum(NamedTuple):
    """`pair` times `factor`, plus `slope` times the distance from `origin`, plus `row`."""

    pair: str = ""
    factor: Row | None = None
    slope: Row | None = None
    row: Row | None = None
    # Whether a product may be that of each part, because no part is much larger than the sum.
    is_exact: bool = False
    # Whether the pair consists of multiples of the score, of hyperbolic tangents and of distances.
    is_bounded: bool = False


def bare(text: str) -> str:
    """Returns an expression without parentheses around all of it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth and place < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


class Block:
    """The lines of one function for a block of places."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        # By node: its sum or None, the name of its value, and the name of its words or nothing.
        self.sums: dict[int, Sum | None] = {}
        self.names: dict[int, str] = {}
        self.words: dict[int, str] = {}
        # Values of a tile or launch that the lines read, in order.
        self.inputs: dict[str, None] = {}

    def add(self, name: str, text: str) -> str:
        """Adds the line of a value, and returns its name."""
        self.lines.append(f"{name} = {bare(text)}")
        return name

    def read(self, *rows: Row | None) -> None:
        """Adds values of a tile or launch to the inputs, except constants."""
        names = (row.text for row in rows if row is not None and row.text.isidentifier())
        self.inputs |= dict.fromkeys(name for name in names if name not in ("True", "False"))


class BlockWriter(PlaceWriter):
    """Writes values of blocks."""

    # The first place of a block, offsets of its places, and their number.
    walk: tuple[str, str, str] = ("n_block * BLOCK_N", "n_offsets", "BLOCK_N")
    # Beginnings of the names of values, by their form.
    prefixes = ("", "", "key", "pair")

    def operand_of(self, block: Block, place: int, form: int) -> str:
        """Returns a value as an operand of a value of some form."""
        own = self.forms[place]
        if own < 2:
            row = self.row(place)
            block.read(row)
            return row.wide if form == 3 else row.text
        if place not in block.names:
            parts = self.parts_of(block, place) if self.functions.kinds[place] is Kind.FLOAT else None
            text = self.computed(block, place) if parts is None else self.text_of(block, parts, own)
            block.names[place] = block.add(f"{self.prefixes[own]}_{place}", text)
        return block.names[place] + "[None, :]" * (own == 2 and form == 3)

    def computed(self, block: Block, place: int) -> str:
        """Returns the text of an operation of a block that makes no sum."""
        node, form = self.functions.nodes[place], self.forms[place]
        if node.op is self.walked:
            return self.leaves[node.op]
        if self.divides_walked(place):
            return self._divided(block, place)
        found = self.within(place)
        if found is not None:
            _, first, last = found
            middle = self.operand_of(block, found[0], 3)
            block.read(first, last)
            return f"({first.wide} <= {middle}) & ({middle} <= {last.wide})"
        operands = [self.operand_of(block, operand, form) for operand in node.operands]
        if node.op is Op.LOAD:
            sizes = [line.split(" = ")[0] for line in self.sizes() if line.split("_")[1] == str(node.value)]
            block.inputs |= dict.fromkeys((TABLES[node.value], *sizes))
            return self.load(place, operands)
        if node.op is Op.DIVIDE and self.forms[node.operands[1]] >= 2 and place not in self.exact:
            return f"{operands[0]} * inverse({operands[1]})"
        return self.pattern(place).format(*operands)

    def _divided(self, block: Block, place: int) -> str:
        """Returns the quotient or the remainder of the places of a block."""
        first, divisor = self.functions.nodes[place].operands
        start, offsets, _ = self.walk
        quotient = f"quotient_{first}_{divisor}"
        places = f"{start}, {offsets} & 6, {offsets} & -7"
        line = f"{quotient} = divide_places({places}, {self.divisor_of(block, divisor)})"
        if line not in block.lines:
            block.lines.append(line)
        if self.is_quotient(place):
            return quotient
        return f"{self.operand_of(block, first, 2)} - {quotient} * {self.name(divisor)}"

    def divisor_of(self, block: Block, place: int) -> str:
        """Returns a divisor and its reciprocal as arguments of functions."""
        text, reciprocal = self.scalar_text(place), Row(f"reciprocal_{place}")
        line = f"{reciprocal.text} = reciprocal_of({text}, {self.walk[2]})"
        if line not in self.tile:
            self.tile.append(line)
        block.read(self.row(place), reciprocal)
        return f"{text}, {reciprocal.text}"

    def sum_of(self, block: Block, place: int) -> Sum:
        """Returns a float as a sum."""
        return self.parts_of(block, place) or Sum(self.operand_of(block, place, 3))

    def parts_of(self, block: Block, place: int) -> Sum | None:
        """Returns the sum that an operation makes of its operands, or None."""
        if place not in block.sums:
            block.sums[place] = self._new_parts(block, place)
        return block.sums[place]

    def _new_parts(self, block: Block, place: int) -> Sum | None:
        if self.forms[place] < 2:
            return Sum(row=self.row(place))
        node = self.functions.nodes[place]
        if place in self.exact or (self.forms[place] == 2 and not self._is_distance(block, place)):
            return None
        match node.op:
            case Op.SCORE:
                return Sum("s", Row("score_scale"), is_bounded=True)
            case Op.TO_FLOAT:
                return self._converted(block, node.operands[0])
            case Op.NEGATE:
                return self.scaled(block, self.sum_of(block, node.operands[0]), Row("-1.0"), is_exact=True)
            case Op.ADD | Op.SUBTRACT:
                first, other = (self.sum_of(block, operand) for operand in node.operands)
                if node.op is Op.SUBTRACT:
                    other = self.scaled(block, other, Row("-1.0"), is_exact=True)
                return self._added(block, first, other)
            case Op.MULTIPLY | Op.DIVIDE:
                return self._multiplied(block, place)
            case Op.TANH if self.forms[place] == 3:
                x = self.scaled(block, self.sum_of(block, node.operands[0]), Row(TANH))
                own = block.add(f"half_{place}", f"logistic{self.text_of(block, x, 3)}")
                return Sum(own, Row("2.0"), None, Row("-1.0"), is_exact=True, is_bounded=True)
        return None

    def _is_distance(self, block: Block, place: int) -> bool:
        """Returns whether a value of keys is a distance, or a sum or product of some and of other numbers."""
        node = self.functions.nodes[place]
        if node.op is Op.TO_FLOAT:
            return True
        is_scaled = node.op in (Op.MULTIPLY, Op.DIVIDE)
        sums = [
            self.parts_of(block, operand) if self.functions.kinds[operand] is Kind.FLOAT else None
            for operand in node.operands
            if self.forms[operand] == 2
        ]
        return not any(own is None or own.pair or (is_scaled and not own.is_exact) for own in sums)

    def _converted(self, block: Block, place: int) -> Sum | None:
        """Returns the float of an int, if it is a distance of a query and a key."""
        node = self.functions.nodes[place]
        if node.op is not Op.ABS:
            return self._affine(place)
        distance = self._affine(node.operands[0]) if self.forms[place] == 3 else None
        return distance and Sum(f"gl.abs{self.text_of(block, distance, 3)}", is_bounded=True)

    def _multiplied(self, block: Block, place: int) -> Sum | None:
        """Returns a product with, or a quotient by, a number that does not depend on keys."""
        node = self.functions.nodes[place]
        first, other = node.operands
        if node.op is Op.MULTIPLY and self.forms[other] >= 2:
            first, other = other, first
        if self.forms[other] >= 2:
            return None
        row = self.row(other)
        if node.op is Op.DIVIDE:
            row = self.of_tile("1.0 / {0}", row)
        return self.scaled(block, self.sum_of(block, first), row)

    def scaled(self, block: Block, value: Sum, by: Row, *, is_exact: bool = False) -> Sum:
        """Returns a sum times a number that does not depend on keys."""
        parts = sum(bool(part) for part in (value.pair, value.slope, value.row))
        if parts > 1 and not (value.is_exact or is_exact):
            whole = block.add(f"sum_{len(block.lines)}", self.text_of(block, value, 3))
            value = Sum(whole, is_bounded=value.is_bounded)
        factor, slope, row = (self._times(part, by) for part in (value.factor, value.slope, value.row))
        return Sum(
            value.pair, (factor or by) if value.pair else None, slope, row, value.is_exact, value.is_bounded
        )

    def _added(self, block: Block, first: Sum, other: Sum) -> Sum:
        """Returns the sum of two sums."""
        pair, factor = first.pair or other.pair, first.factor if first.pair else other.factor
        if first.pair and other.pair:
            left, right = (self.text_of(block, Sum(own.pair, own.factor), 3) for own in (first, other))
            pair, factor = block.add(f"sum_{len(block.lines)}", f"{left} + {right}"), None
        return Sum(
            pair,
            factor,
            self._plus(first.slope, other.slope),
            self._plus(first.row, other.row),
            first.is_exact and other.is_exact and not (first.pair and other.pair),
            all(own.is_bounded or not own.pair for own in (first, other)),
        )

    def _affine(self, place: int) -> Sum | None:
        """Returns the float of an int that is a place, plus or minus ints that do not depend on it."""
        found = self.place_and_terms(place)
        if found is None:
            return None
        sign, terms = found
        origin = "origin" if sign > 0 else "-origin"
        text = " ".join([origin, *(f"{'+' if own > 0 else '-'} {self.name(term)}" for own, term in terms)])
        row = self.of_tile(f"({text}).to(gl.float32)", *(self.row(term) for _, term in terms))
        return Sum("", None, Row(f"{sign}.0"), row, is_exact=True)

    def _times(self, part: Row | None, by: Row) -> Row | None:
        if part is None:
            return None
        first, other = _number(part.text), _number(by.text)
        # Larger products are computed in the kernel, where they are infinite.
        if first is not None and other is not None and abs(first * other) <= LARGEST_FLOAT:
            return Row(repr(first * other))
        if first == 1.0:
            return by
        return part if other == 1.0 else self.of_tile("{0} * {1}", part, by)

    def _plus(self, first: Row | None, other: Row | None) -> Row | None:
        if first is None or other is None:
            return first or other
        return self.of_tile("{0} + {1}", first, other)

    def text_of(self, block: Block, value: Sum, form: int) -> str:
        """Returns the text of a sum, [GROUP_M, BLOCK_N], or [BLOCK_N] with form 2."""

        def wide(row: Row) -> str:
            return row.wide if form == 3 else row.text

        block.read(value.factor, value.slope, value.row)
        text, own = "", value.pair
        if value.slope is not None:
            start, offsets, _ = self.walk
            # Distances from `origin` of the places that a thread computes, which differ by constants.
            distances = [
                f"steps = ({offsets} & -7).to(gl.float32)",
                f"start = ({start} - origin + ({offsets} & 6)).to(gl.float32)",
            ]
            if distances[0] not in block.lines:
                block.lines += distances
            added, slope = "[None, :]" * (form == 3), wide(value.slope)
            text = f"gl.fma(steps{added}, {slope}, {slope} * start{added})"
        if own and value.factor is not None:
            factor = wide(value.factor)
            text = f"gl.fma({own}, {factor}, {text})" if text else f"{own} * {factor}"
        elif own:
            text = f"{own} + {text}" if text else own
        if value.row is not None:
            text = f"{text} + {wide(value.row)}" if text else wide(value.row)
        return f"({text})"


def _number(text: str) -> float | None:
    try:
        return float(text.strip("()"))
    except ValueError:
        return None
