"""Masks as words in Gluon, and functions that divide places of a block and make words of them.

A word has a bit for each of the up to 32 places of a block that a thread has in a row.
"""

from collections.abc import Mapping

from flashtune.core.expressions.intervals import UNKNOWN
from flashtune.core.expressions.nodes import Kind, Node, Op
from flashtune.templates.common.args.gluon_blocks import Block, BlockWriter
from flashtune.templates.common.args.gluon_places import Row

# Functions of a kernel that calls them.
CALLED: Mapping[str, str] = {
    "places_from": '''
@gluon.jit
def places_from(first):
    """Returns words of the places from a distance on. Those of a thread are 0, 1, 8, 9, 16, and so on."""
    first = gl.maximum(gl.minimum(first, 122), 0)
    return (gl.zeros_like(first) - 1 << ((first >> 2) & 30)) << gl.minimum(first & 7, 2)
''',
    "places_with": '''
@gluon.jit
def places_with(least, greatest, start, thread_places, divisor, reciprocal, WIDTH: gl.constexpr):
    """Returns words of the places of which the remainder is within an interval."""
    factor, size, near = reciprocal
    # With a negative divisor, the remainder of x is that of x - 1 by its size, less the size, plus 1.
    turns = (divisor < 0).to(gl.int32)
    # The size of the least int32 is that of the next one: remainders below 0 are greater by 1.
    is_least = divisor == -2147483648
    least = gl.where(is_least & (least < 0), least + 1, least)
    greatest = gl.where(is_least & (greatest < -1), greatest + 1, greatest)
    added = turns * (size - 1)
    first = start - turns
    rest = first - floor_divide(first, size) * size
    # Numbers beyond all remainders may be at the ends of int32.
    last = size - 1 - added
    least = gl.maximum(gl.minimum(least, last + 1) + added, 0)
    greatest = gl.maximum(gl.minimum(greatest, last) + added, -1)
    words = gl.zeros_like(least + thread_places)
    if size > 16:
        periods = (gl.maximum(rest - (size - near), 0) + WIDTH - 1) * factor >> 20
        for period in range(0, periods + 1):
            # Sums that are larger than a block's width may be too large for an int32.
            step = period * size
            end = gl.minimum(greatest - rest, WIDTH - step) + step - thread_places
            words = words | (
                places_from(gl.minimum(least - rest, WIDTH - step) + step - thread_places)
                & (places_from(end + 1) ^ -1)
            )
    else:
        # Bits repeat after eight times the size, which is two bits for each of the divisor's remainders.
        columns = gl.minimum(2 * near, 32)
        for column in range(0, columns):
            place = rest + (column >> 1) * 8 + (column & 1) + thread_places
            remainder = place - (place * factor >> 20) * size
            words = words | (((least <= remainder) & (remainder <= greatest)).to(gl.int32) << column)
        while columns < 32:
            words = words | (words << columns)
            columns = 2 * columns
    return words
''',
    "places_between": '''
@gluon.jit
def places_between(least, greatest, divisor):
    """Returns the first place of which the quotient is within an interval, and that after the last."""
    # Larger divisors have the same quotients.
    divisor = gl.maximum(gl.minimum(divisor, 1073741824), -1073741824)
    farthest = 1073741823 // gl.maximum(gl.abs(divisor), 1) + 1
    start = gl.maximum(gl.minimum(least, farthest), -farthest) * divisor
    end = (gl.maximum(gl.minimum(greatest, farthest - 1), -farthest - 1) + 1) * divisor
    first, after = gl.where(divisor > 0, start, end + 1), gl.where(divisor > 0, end, start + 1)
    return gl.maximum(gl.minimum(first, 1073741824), 0), gl.maximum(gl.minimum(after, 1073741824), 0)
''',
    "reciprocal_of": '''
@gluon.jit
def reciprocal_of(divisor, WIDTH: gl.constexpr):
    """Returns 2**20 / size, rounded up, for a size of at most WIDTH, and the divisor's size and this one."""
    # The negative of the least int32 is no int32.
    size = gl.maximum(gl.abs(gl.maximum(divisor, -2147483647)), 1)
    near = gl.minimum(size, WIDTH)
    return 1048576 // near + 1, size, near
''',
    "divide_places": '''
@gluon.jit
def divide_places(start, thread_offsets, steps, divisor, reciprocal):
    """Returns start + thread_offsets + steps, divided by a divisor and rounded to minus infinity.

    The offsets of a block, up to its width, are divided by a product, which is exact for their size.
    """
    factor, size, near = reciprocal
    # With a negative divisor, x / divisor is -1 - (x - 1) / size.
    turns = (divisor < 0).to(gl.int32)
    first = start - turns
    quotient = floor_divide(first, size)
    # A block's offsets pass at most one multiple of a size above its width: that of the width does as well.
    rest = gl.maximum(first - quotient * size - (size - near), 0) + thread_offsets
    return (quotient ^ -turns) + ((rest + steps) * factor >> 20) * (1 - 2 * turns)
''',
}


class WordWriter(BlockWriter):
    """Writes words of bools."""

    def word(self, block: Block, place: int) -> str:
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
        node, name = self.functions.nodes[place], f"word_{place}"
        if self.forms[place] < 2 or self.functions.kinds[place] is not Kind.BOOL:
            return ""
        if node.op in (Op.AND, Op.OR, Op.NOT):
            words = [self.word(block, operand) for operand in node.operands]
            text = self.pattern(place).format(*words) if node.op is not Op.NOT else f"{words[0]} ^ -1"
            return block.add(name, text) if all(words) else ""
        if self._is_periodic(place):
            first, second = (self._at_column(block, place, column) for column in range(2))
            block.add(f"even_{place}", f"gl.where({first}, {0x55555555}, 0)")
            return block.add(name, f"even_{place} | gl.where({second}, {-0x55555556}, 0)")
        start, _, width = self.walk
        remainders = self._remainders(place)
        if remainders is not None:
            divisor, least, greatest = remainders
            block.add("least", self._in_word(block, least))
            block.add("greatest", self._in_word(block, greatest))
            rest = f"{start}, thread_places, {self.divisor_of(block, divisor)}, {width}"
            return block.add(name, f"places_with(least, greatest, {rest})")
        ends = self.ends_of(place)
        if ends is None:
            return ""
        first, after = (
            f"places_from({self._in_word(block, end)} - {start} - thread_places)" if end.text else ""
            for end in ends
        )
        block.add(name, first or f"{after} ^ -1")
        return block.add(name, f"{name} & ({after} ^ -1)") if first and after else name

    def _is_periodic(self, place: int) -> bool:
        """Returns whether a value depends on keys only by their last three bits."""
        node = self.functions.nodes[place]
        if self.forms[place] < 2:
            return True
        if self.functions.kinds[place] is Kind.FLOAT or not node.operands:
            return False
        if node.op is Op.REMAINDER and 0 < self.power(place) <= 8:
            return self.place_and_terms(node.operands[0]) is not None
        return node.op is not Op.LOAD and all(map(self._is_periodic, node.operands))

    def _in_word(self, block: Block, row: Row) -> str:
        """Returns a number of rows as an operand of words, [rows, 4]."""
        line = "thread_places = places_of_thread(s)"
        if line not in block.lines:
            block.lines.insert(0, line)
        block.read(row)
        return f"of_words({row.text}, s)" if row.form else row.text

    def _remainders(self, place: int) -> tuple[int, Row, Row] | None:
        """Returns a divisor, and the least and the greatest remainder of visible places, or None."""
        found, nodes = self.within(place), self.functions.nodes
        if found is not None:
            key, least, greatest = found
            return (nodes[key].operands[1], least, greatest) if self._is_remainder(key) else None
        if nodes[place].op is not Op.EQUAL:
            return None
        row, key = sorted(nodes[place].operands, key=lambda operand: self.forms[operand])
        if self.forms[row] < 2 and self._is_remainder(key):
            return nodes[key].operands[1], self.row(row), self.row(row)
        if nodes[row] != Node(Op.INT) or nodes[key].op is not Op.REMAINDER:
            return None
        # Differences are multiples of a number if both places have the same remainder.
        distance, divisor = nodes[key].operands
        if nodes[distance].op is Op.ABS:
            distance = nodes[distance].operands[0]
        terms = self.place_and_terms(distance)
        if self.forms[divisor] or terms is None or self.bounds[distance] == UNKNOWN:
            return None
        total = self.total([(-terms[0] * own, term) for own, term in terms[1]])
        if total is None or total.form != 1:
            return None
        number = self.name(divisor)
        same = self.of_tile(f"{{0}} - floor_divide({{0}}, {number}) * {number}", total)
        return divisor, same, same

    def _is_remainder(self, place: int) -> bool:
        return self.divides_walked(place) and not self.is_quotient(place)

    def _at_column(self, block: Block, place: int, column: int) -> str:
        """Returns the text of a periodic value at the first or the second place of a thread."""
        node = self.functions.nodes[place]
        if self.forms[place] < 2:
            return self._in_word(block, self.row(place))
        if node.op is Op.REMAINDER and self.power(place):
            found = self.place_and_terms(node.operands[0])
            assert found is not None
            text = f"{'' if found[0] > 0 else '-'}({self.walk[0]} + thread_places + {column})"
            for sign, term in found[1]:
                text += f" {'+' if sign > 0 else '-'} {self._in_word(block, self.row(term))}"
            return f"(({text}) & {self.power(place) - 1})"
        operands = [self._at_column(block, operand, column) for operand in node.operands]
        return f"({self.pattern(place).format(*operands)})"
