"""Gluon code that adds gradients to those of captured tensors, where keys stay and queries are walked.

The buffer `dtables` has the gradients of all captured tensors that have one, one after the other. Sums for
loads with an index that does not depend on the query are kept for each key, until the head ends.
"""

import functools
import re

from flashtune.core.expressions.derivative import Derivatives
from flashtune.templates.common.args.gluon_functions import Block
from flashtune.templates.common.args.gluon_gradients import GradientWriter

_HELPERS = {
    "add_by_warps": '''
@gluon.jit
def add_by_warps(gradient, places, change):
    """Adds to one element of each query, for the keys of each warp at once."""
    of_warps = gl.sum(change.reshape([4, ROWS // 4, BLOCK_M // FUNCTION_PARTS]), 1)
    layout: gl.constexpr = gl.SliceLayout(0, of_warps.type.layout)
    places = gl.convert_layout(places, layout)[None, :] + gl.zeros_like(of_warps).to(gl.int32)
    gl.atomic_add(gradient + places, of_warps, mask=of_warps != 0.0, sem="relaxed")
''',
    "add_by_keys": '''
@gluon.jit
def add_by_keys(gradient, places, change):
    """Adds to elements of pairs. Queries of a key often have one element, such as that of distant ones."""
    least, most, of_keys = gl.min(places, 1), gl.max(places, 1), gl.sum(change, 1)
    adds_sum = (least == most) & (of_keys != 0.0)
    gl.atomic_add(gradient + most, of_keys, mask=adds_sum, sem="relaxed")
    gl.atomic_add(gradient + places, change, mask=(least != most)[:, None] & (change != 0.0), sem="relaxed")
''',
}
# Functions of which the code is kept.
MAX_KEPT = 64
# Names of sizes that a place needs.
_SIZES = re.compile(r"(?:numbers|size)_\d+_\d+")


def gluon_gradient_lines(functions: Derivatives, part: str) -> str:
    """Returns lines of code of functions, and of derivatives by the score and by captured tensors.

    Args:
        functions: The typed expressions.
        part: "functions" for functions at the top of a file, "constants" for values of a launch, "keys" for
            those of a tile of keys, and "heads" for those of a tile and a head. "score" and "mask" for the
            further arguments of `change_scores` and `hide_by_function`, or "both" for all. Changed scores
            are in natural units. If the derivative of the score is not 1, `change_scores` returns it too.
            With gradients of captured tensors, `add_elements` adds the terms of a tile. "elements" for its
            further arguments, and "sums" for the names of its results. It takes gradients of changed scores
            if "plain" is not empty. "held" for names of derivatives that depend on the score. "start" for
            places of gradients and sums, and "end" for lines that add the sums of a head.
    """
    return _writer(functions).parts.get(part, "")


def can_add_elements(functions: Derivatives) -> bool:
    """Returns whether the lines compute the gradients of captured tensors of functions.

    They compute none if the index depends on the score. Derivatives may depend on it if that by the score is
    not 1: products with probabilities are kept of both.
    """
    writer = _writer(functions)
    loads = (element.load for element in functions.elements)
    return not any(map(writer.depends_on_score, loads)) and (functions.slope >= 0 or not writer.held)


@functools.lru_cache(MAX_KEPT)
def _writer(functions: Derivatives) -> "_ElementWriter":
    """Returns the writer of functions. A kernel has many parts of it."""
    return _ElementWriter(functions)


class _ElementWriter(GradientWriter):
    def _further_functions(self) -> list[str]:
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
        function = self._adding_function(kept)
        return [text for name, text in _HELPERS.items() if f"{name}(" in function] + [function]

    def _adding_function(self, kept: list[str]) -> str:
        block, held = Block(), [f"term_{number}" for number in self.held]
        self.parts["held"] = ", ".join(held)
        self.parts["plain"] = "True" * (len(held) < len(self.functions.elements))
        for number, element in enumerate(self.functions.elements):
            if number in self.held:
                block.lines.append(f"change = term_{number}.to(gl.float32) * dp")
            else:
                slope = self._operand(block, element.slope, 3)
                # The derivative by an element may be infinite where the key is hidden.
                block.lines.append(f"change = gl.where(ds == 0.0, 0.0, ds * {slope})")
            form = self.forms[element.load]
            if form < 2:
                block.lines.append(f"element_{number} += gl.sum(change, 1)")
                block.inputs[f"element_{number}"] = None
            else:
                block.lines += self._added_at_once(block, element.load, form)
        self.parts["elements"] = ", ".join(block.inputs)
        tiles = ", ".join((["ds"] if self.parts["plain"] else []) + (["dp", *held] if held else []))
        explanation = "Adds the gradients of captured tensors of a tile."
        last = [f"return {', '.join(kept)}"] if kept else []
        return self._definition("add_elements", block, tiles, last, explanation)

    def _added_at_once(self, block: Block, load: int, form: int) -> list[str]:
        """Returns the lines that add `change` to the elements of a load that depends on queries."""
        indices = self.functions.nodes[load].operands
        terms = self._terms(load, [self._operand(block, index, form) for index in indices])
        gradient = f"gradient_{self.functions.nodes[load].value}"
        block.inputs[gradient] = None
        block.inputs |= dict.fromkeys(_SIZES.findall(terms))
        places = terms.removeprefix(" + ")
        if form == 2:
            return [f"add_by_warps({gradient}, {places}, change)"]
        if any(self.forms[index] == 3 for index in indices):
            return [f"add_by_keys({gradient}, {places}, change)"]
        return [f'gl.atomic_add({gradient} + {places}, change, mask=change != 0.0, sem="relaxed")']

    def _terms(self, load: int, operands: list[str]) -> str:
        """Returns the summands of the place of an element in the gradient of its captured tensor."""
        table, last = self.functions.nodes[load].value, len(operands) - 1
        strides = [f" * numbers_{table}_{axis + 1}" if axis < last else "" for axis in range(len(operands))]
        return "".join(self.offsets(load, operands, strides))

    def _places(self) -> list[str]:
        """Returns the lines that make the places of gradients, and count the elements from each axis on."""
        lines, base = [], "dtables"
        for place, table in enumerate(self.functions.tables):
            if not table.has_gradient:
                continue
            lines.append(f"gradient_{place} = {base}")
            for axis in reversed(range(table.dimensions)):
                later = f" * numbers_{place}_{axis + 1}" if axis + 1 < table.dimensions else ""
                size = f"gl.load(function_ints + {self.shapes[place] + axis})"
                lines.append(f"numbers_{place}_{axis} = {size}{later}")
            base = f"gradient_{place} + " + (f"numbers_{place}_0" if table.dimensions else "1")
        return lines

    def _ended(self, number: int) -> list[str]:
        """Returns the lines that add the sum of an element at the end of a head."""
        load = self.functions.elements[number].load
        node = self.functions.nodes[load]
        terms = self._terms(load, [self.name(index) for index in node.operands])
        places = f"gradient_{node.value}{terms} + function_keys * 0"
        return [
            f'gl.atomic_add({places}, element_{number}, sem="relaxed")',
            f"element_{number} = gl.zeros_like(element_{number})",
        ]
