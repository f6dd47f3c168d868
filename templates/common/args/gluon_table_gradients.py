"""Gluon code that adds gradients to those of captured tensors, where keys stay and queries are walked.

The buffer `dtables` has the gradients of all captured tensors that have one, one after the other. Sums for
loads with an index that does not depend on the query are kept for each key, until the head ends.
"""

import functools
import re

from flashtune.core.expressions.derivative import Derivatives
from flashtune.core.expressions.nodes import Op
from flashtune.templates.common.args.gluon_blocks import Block
from flashtune.templates.common.args.gluon_gradients import GradientWriter

_HELPERS = {
    "sums_of_queries": '''
COLUMNS = gl.constexpr(BLOCK_M // FUNCTION_PARTS)
SUMS_LAYOUT = gl.constexpr(
    gl.BlockedLayout([COLUMNS // 4, 1], [128 // COLUMNS, COLUMNS // 4], [1, 4], [1, 0])
)


@gluon.jit
def sums_of_queries(change):
    """Returns the sums over keys. Threads add their own keys first, and then exchange the sums once."""
    of_threads = gl.sum(change.reshape([4, 2, 8, COLUMNS]), 1).reshape([32, COLUMNS])
    return gl.sum(gl.convert_layout(of_threads, SUMS_LAYOUT), 0)
''',
    "add_by_warps": '''
@gluon.jit
def add_by_warps(gradient, places, change):
    """Adds to elements of pairs. All pairs of a warp often have one element, such as that of distant ones."""
    pairs: gl.constexpr = ROWS // 4 * (BLOCK_M // FUNCTION_PARTS)
    places, change = places.reshape([4, pairs]), change.reshape([4, pairs])
    least, most, of_warps = gl.min(places, 1), gl.max(places, 1), gl.sum(change, 1)
    adds_sum = (least == most) & (of_warps != 0.0)
    gl.atomic_add(gradient + most, of_warps, mask=adds_sum, sem="relaxed")
    gl.atomic_add(gradient + places, change, mask=(least != most)[:, None] & (change != 0.0), sem="relaxed")
''',
}
# Functions of which the code is kept.
MAX_KEPT = 64
# Names of gradients and sizes that a place needs.
_SIZES = re.compile(r"gradient_\d+|(?:numbers|size)_\d+_\d+")


def gluon_gradient_lines(functions: Derivatives, part: str) -> str:
    """Returns lines of code of functions, and of derivatives by the score and by captured tensors.

    Args:
        functions: The typed expressions.
        part: "functions" for functions at the top of a file, "constants" for values of a launch, "keys" for
            those of a tile of keys, and "heads" for those of a tile and a head. "score" and "mask" for the
            further arguments of `change_scores` and `hide_by_function`, or "both" for all. Changed scores
            are in natural units. If the derivative of the score differs between pairs, `change_scores`
            returns it too. If it is one number other than 1, "slope" is its text.
            With gradients of captured tensors, `add_elements` adds the terms of a tile. "elements" for its
            further arguments, and "sums" for the names of its results. It takes gradients of changed scores
            if "plain" is not empty. "held" for names of parts of derivatives that depend on the score.
            "start" for places of gradients and sums, and "end" for lines that add the sums of a head.
    """
    return _writer(functions).parts.get(part, "")


def can_add_elements(functions: Derivatives) -> bool:
    """Returns whether the lines compute the gradients of captured tensors of functions.

    They compute none if the index depends on the score. Derivatives may depend on it if that by the score is
    not 1: products with probabilities are kept of both.
    """
    writer = _writer(functions)
    depend = any(writer.depends_on(element.load, Op.SCORE) for element in functions.elements)
    return not depend and (functions.slope >= 0 or not writer.held)


def keeps_products(functions: Derivatives) -> bool:
    """Returns whether probabilities are kept in 16 bits, and products of them with derivatives."""
    lines = _writer(functions)
    return bool(functions.slope >= 0 and not lines.parts["slope"]) or bool(lines.held)


def adds_tiles(functions: Derivatives) -> bool:
    """Returns whether gradients of captured tensors are added from tiles of terms, or in each block."""
    writer = _writer(functions)
    return bool(writer.held) or any(writer.forms[element.load] > 1 for element in functions.elements)


@functools.lru_cache(MAX_KEPT)
def _writer(functions: Derivatives) -> "_ElementWriter":
    """Returns the writer of functions. A kernel has many parts of it."""
    return _ElementWriter(functions)


class _ElementWriter(GradientWriter):
    def further_functions(self) -> list[str]:
        elements = self.functions.elements
        if not elements:
            return []
        ended = [number for number, element in enumerate(elements) if self.forms[element.load] < 2]
        kept = [f"element_{number}" for number in ended]
        sums = [f"{name} = gl.zeros_like(function_keys.to(gl.float32))" for name in kept]
        self.parts |= {
            "sums": ", ".join(kept),
            "start": "\n".join([*self._places(), *sums]),
            "end": "\n".join(line for number in ended for line in self._ended(number)),
        }
        functions = self._adding_functions(kept)
        function = functions[-1]
        return [text for name, text in _HELPERS.items() if f"{name}(" in function] + functions

    def _adding_functions(self, kept: list[str]) -> list[str]:
        block, held = Block(), [f"term_{number}" for number in range(len(self.held))]
        divided = [self.divided(element.slope) for element in self.functions.elements]
        self.parts["held"] = ", ".join(held)
        self.parts["plain"] = "True" * any(part < 0 for part, _ in divided)
        functions = []
        for number, element in enumerate(self.functions.elements):
            part, operations = divided[number]
            change, form = "ds", self.forms[element.load]
            if part >= 0:
                block.lines.append(f"change = term_{self.held.index(part)}.to(gl.float32) * dp")
                change = "change"
            # Numbers of queries multiply sums.
            later = [own for own in operations if form == 2 and (own[1] < 0 or self.forms[own[1]] in (0, 2))]
            sooner = [own for own in operations if own not in later]
            self._multiply(block, change, sooner)
            if form < 2:
                block.lines.append(f"element_{number} += gl.sum(change, 1)")
                block.inputs[f"element_{number}"] = None
            elif form == 2:
                own, name = Block(), f"add_to_queries_{number}"
                self._multiply(own, "change", later, 2)
                places = self._places_of(own, element.load, 2)
                own.lines.append(f'gl.atomic_add({places}, change, mask=change != 0.0, sem="relaxed")')
                functions.append(self.definition(name, own, "change", [], "Adds to elements of queries."))
                block.inputs |= own.inputs
                inputs = ", ".join(("row_queries", *self.arguments[2:], *own.inputs))
                block.lines += [
                    "row_queries = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS_LAYOUT))",
                    f"{name}(sums_of_queries(change), m_start, {inputs})",
                ]
            else:
                block.lines.append(self._added_at_once(block, element.load))
        self.parts["elements"] = ", ".join(block.inputs)
        tiles = ", ".join((["ds"] if self.parts["plain"] else []) + (["dp", *held] if held else []))
        explanation = "Adds the gradients of captured tensors of a tile."
        last = [f"return {', '.join(kept)}"] if kept else []
        functions.append(self.definition("add_elements", block, tiles, last, explanation))
        return functions

    def _multiply(self, block: Block, change: str, operations: list[tuple[Op, int]], form: int = 3) -> None:
        """Appends the lines that make `change` from a number of this name, by values without the score."""
        text = ""
        for op, place in operations:
            operand = "" if op is Op.NEGATE else self.operand_of(block, place, form)
            match op:
                case Op.NEGATE:
                    text = f"(-{text or '1.0'})"
                case Op.MULTIPLY:
                    text = f"({text} * {operand})" if text else operand
                case Op.DIVIDE:
                    text = f"({text or '1.0'} / {operand})"
        if text:
            # The derivative by an element may be infinite where the key is hidden.
            block.lines.append(f"change = gl.where({change} == 0.0, 0.0, {change} * {text})")
        elif change != "change":
            block.lines.append(f"change = {change}")

    def _places_of(self, block: Block, load: int, form: int) -> str:
        """Returns the pointers to the elements of a load in the gradient."""
        indices = self.functions.nodes[load].operands
        places = self.gradient_place(load, [self.operand_of(block, index, form) for index in indices])
        block.inputs |= dict.fromkeys(_SIZES.findall(places))
        return places

    def _added_at_once(self, block: Block, load: int) -> str:
        """Returns the line that adds `change` to the elements of a load that depends on queries and keys."""
        places = self._places_of(block, load, 3)
        if any(self.forms[index] == 3 for index in self.functions.nodes[load].operands):
            gradient, terms = places.split(" + ", 1)
            return f"add_by_warps({gradient}, {terms}, change)"
        return f'gl.atomic_add({places}, change, mask=change != 0.0, sem="relaxed")'

    def _places(self) -> list[str]:
        """Returns the lines that make the places of gradients, and count the elements from each axis on."""
        lines, base = [], "dtables"
        for place in self.functions.trained:
            lines += [f"gradient_{place} = {base}", *self.numbers(place)]
            count = f"numbers_{place}_0" if self.functions.tables[place].dimensions else "1"
            base = f"gradient_{place} + {count}"
        return lines

    def _ended(self, number: int) -> list[str]:
        """Returns the lines that add the sum of an element at the end of a head."""
        load = self.functions.elements[number].load
        places = self.gradient_place(load, [*map(self.name, self.functions.nodes[load].operands)])
        return [
            f'gl.atomic_add({places} + function_keys * 0, element_{number}, sem="relaxed")',
            f"element_{number} = gl.zeros_like(element_{number})",
        ]
