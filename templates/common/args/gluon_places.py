"""Values of a tile or a launch in Gluon, and the places of a block that comparisons show.

Blocks are of keys, or of queries where those are walked. A value that does not depend on the walked places is
a scalar, or has a number for each row. Comparisons of places become ends of intervals, one for each row.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flashtune.core.expressions.intervals import UNKNOWN, Interval, intervals
from flashtune.core.expressions.nodes import INT32, Expressions, Kind, Op
from flashtune.templates.common.args.function_lines import Writer

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
_DIVISIONS = (Op.FLOOR_DIVIDE, Op.REMAINDER)
# The coordinates of descriptors are below this one.
ANY_PLACE = Interval(0, 2**30)
# No two places are so far apart. Larger captured ints make no difference in a comparison of places.
FARTHEST = 2**29
# Sequences have fewer queries and keys than this.
NEAR = 2**27
# The exponent of a hyperbolic tangent is its operand times this number.
TANH = "-2.8853900817779268"


class Row(NamedTuple):
    """A value that does not depend on walked places: its text, and its form, 0 of a scalar and 1 of rows."""

    text: str
    form: int = 0

    @property
    def wide(self) -> str:
        """The text of an operand of tiles."""
        return self.text + "[:, None]" * self.form


class PlaceWriter(Writer):
    """Writes values of tiles. Of `GradientWriter`, blocks are of queries, and a program holds keys."""

    language, leaves, existing = "gl", _LEAVES, _EXISTING
    types: Mapping[Kind, str] = {Kind.BOOL: "gl.int1", Kind.INT: "gl.int32", Kind.FLOAT: "gl.float32"}
    # The place of blocks.
    walked = Op.KEY
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
        # Lines that compute values of a tile.
        self.tile: list[str] = []
        # Results of `within`.
        self.intervals: dict[int, tuple[int, Row, Row] | None] = {}

    def pattern(self, place: int) -> str:
        """Returns the text of an operation, with places for its operands."""
        power = self.power(place)
        if power:
            return f"{{0}} >> {power.bit_length() - 1}" if self.is_quotient(place) else f"{{0}} & {power - 1}"
        text = super().pattern(place).replace("tl.", "gl.")
        if place in self.exact:
            return text
        return text.replace("tanh_of({0})", f"2.0 / (1.0 + gl.exp2({{0}} * {TANH})) - 1.0")

    def used_helpers(self) -> set[Op]:
        """Returns the operations with a function of their own."""
        divided = [place for place, node in enumerate(self.functions.nodes) if node.op in _DIVISIONS]
        return super().used_helpers() - ({Op.FLOOR_DIVIDE} if all(map(self.power, divided)) else set())

    def operand(self, place: int, form: int) -> str:
        """Returns a node's value as an operand of a value of a tile. `operand_of` returns those of blocks."""
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

    def scalar_text(self, place: int) -> str:
        """Returns the text of a scalar, which functions take as a tensor."""
        is_constant = self.functions.nodes[place].op in (Op.BOOL, Op.INT, Op.FLOAT)
        return f"gl.to_tensor({self.name(place)})" if is_constant else self.name(place)

    def depends_on(self, place: int, *ops: Op) -> bool:
        """Returns whether a value depends on one of some leaves."""
        return any(self.functions.nodes[needed].op in ops for needed in self.functions.needed(place))

    def is_quotient(self, place: int) -> bool:
        """Returns whether a division of ints gives the quotient, and not the remainder."""
        return self.functions.nodes[place].op is Op.FLOOR_DIVIDE

    def power(self, place: int) -> int:
        """Returns the divisor of a division of ints if it is a power of two, else 0."""
        node = self.functions.nodes[place]
        if node.op not in _DIVISIONS:
            return 0
        divisor = self.functions.nodes[node.operands[1]]
        is_power = divisor.op is Op.INT and divisor.value > 0 and divisor.value.bit_count() == 1
        return divisor.value if is_power else 0

    def divides_walked(self, place: int) -> bool:
        """Returns whether an operation divides the places of a block by a number."""
        node = self.functions.nodes[place]
        if node.op not in _DIVISIONS or self.power(place):
            return False
        first, divisor = node.operands
        return self.functions.nodes[first].op is self.walked and self.forms[divisor] == 0

    def row(self, place: int) -> Row:
        """Returns the value of a node that does not depend on walked places."""
        return Row(self.name(place), self.forms[place])

    def of_tile(self, text: str, *rows: Row) -> Row:
        """Returns a new value of a tile, from others."""
        form = max((row.form for row in rows), default=0)
        name = f"{('scalar', 'row')[form]}_of_{len(self.tile)}"
        self.tile.append(f"{name} = {text.format(*(row.text for row in rows))}")
        return Row(name, form)

    def coefficients(self, place: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Returns the coefficient of the walked place in an int, and other terms with their signs."""
        node = self.functions.nodes[place]
        if self.forms[place] < 2:
            return 0, [(1, place)]
        if node.op is self.walked:
            return 1, []
        if node.op not in (Op.ADD, Op.SUBTRACT, Op.NEGATE):
            return None
        places, terms = 0, []
        signs = {Op.NEGATE: (-1,), Op.ADD: (1, 1), Op.SUBTRACT: (1, -1)}[node.op]
        for operand, sign in zip(node.operands, signs, strict=True):
            found = self.coefficients(operand)
            if found is None:
                return None
            places += sign * found[0]
            terms += [(sign * own, term) for own, term in found[1]]
        return places, terms

    def place_and_terms(self, place: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Returns `coefficients` of a walked place, plus or minus ints that do not depend on it, or None."""
        found = self.coefficients(place)
        return found if found is not None and found[0] in (1, -1) else None

    def compared(self, place: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Returns terms that a comparison of ints compares with a walked place, or None.

        The sign is 1 if the place is on the left of the comparison, and -1 if it is on the right.
        """
        first, other = map(self.coefficients, self.functions.nodes[place].operands)
        if first is None or other is None or first[0] - other[0] not in (1, -1):
            return None
        sign = first[0] - other[0]
        terms = [(-sign * own, term) for own, term in first[1]]
        terms += [(sign * own, term) for own, term in other[1]]
        return (sign, terms) if self._has_one_limit([term for _, term in terms]) else None

    def _has_one_limit(self, terms: list[int]) -> bool:
        """Returns whether a comparison of places with a sum is the same with unknown terms within FARTHEST.

        This is false for two unknown terms, or for an unknown and a large one: their sum may be small.
        """
        known = [term for term in terms if self.bounds[term] != UNKNOWN]
        if len(known) == len(terms):
            return True
        usual = dict.fromkeys((Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY), Interval(-NEAR, NEAR))
        reaches = intervals(self.functions, usual)
        rest = sum(max(map(abs, reaches[term])) for term in known)
        return len(terms) == len(known) + 1 and rest <= FARTHEST - NEAR

    def summands(self, terms: list[tuple[int, int]]) -> Iterator[tuple[int, Row, list[float]]]:
        """Yields the sign and the value of each term, and the ends of their product."""
        for own, term in terms:
            row, interval = self.row(term), self.bounds[term]
            if interval == UNKNOWN:
                row = self.of_tile(f"gl.maximum(gl.minimum({{0}}, {FARTHEST}), -{FARTHEST})", row)
                interval = Interval(-FARTHEST, FARTHEST)
            yield own, row, sorted(own * bound for bound in interval)

    def total(self, terms: list[tuple[int, int]]) -> Row | None:
        """Returns the sum of terms with signs, or None if it may be beyond int32."""
        total, least, greatest = None, 0.0, 0.0
        for own, row, ends in self.summands(terms):
            least, greatest = least + ends[0], greatest + ends[1]
            if total is None:
                total = row if own > 0 else self.of_tile("-{0}", row)
            else:
                total = self.of_tile("{1} + {0}" if own > 0 else "{1} - {0}", row, total)
        return total if INT32[0] < least and greatest < INT32[-1] else None

    def within(self, place: int) -> tuple[int, Row, Row] | None:
        """Returns a value of walked places, its least and its greatest number for each row, or None.

        It does so for a comparison of the size of a distance with a limit. Comparisons with the ends
        of an interval take less time.
        """
        if place not in self.intervals:
            self.intervals[place] = self._new_interval(place)
        return self.intervals[place]

    def _new_interval(self, place: int) -> tuple[int, Row, Row] | None:
        node, nodes = self.functions.nodes[place], self.functions.nodes
        if (
            node.op not in (Op.LESS, Op.LESS_EQUAL)
            or self.functions.kinds[node.operands[0]] is not Kind.INT
            or self.forms[place] < 3
            or self.forms[node.operands[1]] > 1
        ):
            return None
        size = nodes[node.operands[0]]
        if size.op is not Op.ABS or nodes[size.operands[0]].op is not Op.SUBTRACT:
            return None
        row, key = sorted(nodes[size.operands[0]].operands, key=lambda operand: self.forms[operand])
        if (self.forms[row], self.forms[key]) != (1, 2) or not self._fits(row, key):
            return None
        limit = self.row(node.operands[1])
        if node.op is Op.LESS:
            # Differences are at least 0: smaller limits are all the same.
            limit = self.of_tile("gl.maximum({0}, 0) - 1", limit)
        greatest = INT32[-1]
        before = f"gl.minimum({{1}}, gl.minimum({{0}}, 0) + {greatest})"
        after = f"gl.minimum({{1}}, {greatest} - gl.maximum({{0}}, 0))"
        first, last = (
            self.of_tile(f"{{0}} {sign} gl.maximum({reach}, -1)", self.row(row), limit)
            for sign, reach in (("-", before), ("+", after))
        )
        return key, first, last

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

    def ends_of(self, place: int) -> tuple[Row, Row] | None:
        """Returns the first visible place of each row and that after the last, if a comparison hides others.

        Either is without text if there is none.
        """
        found, node = self.within(place), self.functions.nodes[place]
        if found is not None:
            key, first, last = found
            if self.functions.nodes[key].op is self.walked:
                return self._place(first), self._place(self.of_tile("gl.minimum({0}, 2147483646) + 1", last))
            if not self.divides_walked(key) or not self.is_quotient(key):
                return None
            ends = [f"{end}_of_{len(self.tile)}" for end in ("first", "after")]
            divisor = self.scalar_text(self.functions.nodes[key].operands[1])
            self.tile.append(f"{', '.join(ends)} = places_between({first.text}, {last.text}, {divisor})")
            return Row(ends[0], 1), Row(ends[1], 1)
        if node.op not in (Op.LESS, Op.LESS_EQUAL) or self.functions.kinds[node.operands[0]] is not Kind.INT:
            return None
        limit = self.compared(place)
        # The place is at most, or at least, the sum of these terms.
        total = limit and self.total(limit[1])
        if limit is None or total is None:
            return None
        is_next = (node.op is Op.LESS) != (limit[0] > 0)
        end = self._place(self.of_tile("{0} + 1", total) if is_next else total)
        return (Row(""), end) if limit[0] > 0 else (end, Row(""))

    def _place(self, row: Row) -> Row:
        """Returns a place of each row, or the nearest that keys may have."""
        return self.of_tile(f"gl.maximum(gl.minimum({{0}}, {ANY_PLACE.greatest}), 0)", row)
