"""Gluon code of score and mask functions and of their derivatives, where keys stay and queries are walked.

Tiles are [keys, queries]. Values that do not depend on queries are computed once for a tile of keys, or for
each head if they depend on the head. Others are computed in functions for one block of queries.
"""

import re
from collections.abc import Mapping

from flashtune.core.expressions.derivative import Derivatives
from flashtune.core.expressions.nodes import INT32, Kind, Op
from flashtune.templates.common.args.gluon_blocks import Block
from flashtune.templates.common.args.gluon_functions import GluonWriter
from flashtune.templates.common.args.gluon_places import ANY_PLACE

_LEAVES: Mapping[Op, str] = {
    Op.SCORE: "s",
    Op.BATCH: "batch",
    Op.HEAD: "head",
    Op.QUERY: "m_start + (queries & 6) + (queries & -7)",
    Op.KEY: "n_start + function_keys",
}
_WORDS = re.compile(r"\w+")
_COMPARED = (Op.LESS, Op.LESS_EQUAL, Op.EQUAL, Op.NOT_EQUAL)


class GradientWriter(GluonWriter):
    """Writes functions for blocks of queries."""

    leaves = _LEAVES
    forms_of_leaves: Mapping[Op, int] = {Op.KEY: 1, Op.QUERY: 2, Op.SCORE: 3}
    form_names = ("scalar", "key", "query", "pair")
    walked = Op.QUERY
    arguments = ("m_start", "queries", "seqlen_q", "seqlen_kv", "origin")
    prefixes = form_names
    walk = ("m_start", "queries", "BLOCK_M")
    functions: Derivatives

    def __init__(self, functions: Derivatives) -> None:
        super().__init__(functions)
        self.parts.setdefault("slope", "")
        # A value is one of a head if its text names the head, or another such value.
        varying, lines = {_LEAVES[Op.HEAD]}, dict.fromkeys(("keys", "heads"), "")
        for line in self.parts["rows"].splitlines():
            name, text = line.split(" = ", 1)
            is_of_head = not varying.isdisjoint(_WORDS.findall(text))
            varying |= {name} if is_of_head else set()
            lines["heads" if is_of_head else "keys"] += f"{line}\n"
        self.parts |= {part: text.strip() for part, text in lines.items()}
        inputs = (name for part in ("score", "mask") for name in self.parts[part].split(", ") if name)
        self.parts["both"] = ", ".join(dict.fromkeys(inputs))

    def score_function(self, block: Block) -> str:
        """Returns the definition of the function of changed scores and their derivatives."""
        functions = self.functions
        results = [self.of_pairs(block, self.sum_of(block, functions.score))]
        explanation = "Returns scores after the score function."
        if functions.slope >= 0:
            slope = self.row(functions.slope)
            if self.forms[functions.slope] == 0:
                self.parts["slope"] = slope.text
            else:
                results.append(self.operand_of(block, functions.slope, 3))
                explanation = "Returns scores after the score function, and its derivative by the score."
        if self.held:
            explanation = "Returns scores after the score function, and its derivatives."
        results += (self.operand_of(block, place, 3) for place in self.held)
        return self.definition("change_scores", block, "s", [f"return {', '.join(results)}"], explanation)

    @property
    def held(self) -> list[int]:
        """The distinct parts of derivatives by elements of captured tensors that depend on the score."""
        parts = [self.divided(element.slope)[0] for element in self.functions.elements]
        return [part for part in dict.fromkeys(parts) if part >= 0]

    def divided(self, place: int) -> tuple[int, list[tuple[Op, int]]]:
        """Returns the part of a product that depends on the score, and operations by its other operands.

        The part is -1 if the value does not depend on the score.
        """
        if not self.depends_on(place, Op.SCORE):
            return -1, [(Op.MULTIPLY, place)]
        node = self.functions.nodes[place]
        if node.op is Op.NEGATE:
            part, operations = self.divided(node.operands[0])
            return part, [*operations, (Op.NEGATE, -1)]
        if node.op in (Op.MULTIPLY, Op.DIVIDE):
            first, other = node.operands
            if node.op is Op.MULTIPLY and not self.depends_on(first, Op.SCORE):
                first, other = other, first
            if not self.depends_on(other, Op.SCORE):
                part, operations = self.divided(first)
                return part, [*operations, (node.op, other)]
        return place, []

    def mask_function(self, block: Block) -> str:
        """Returns the definition of the function that hides pairs."""
        visible = self.operand_of(block, self.functions.mask, 3)
        last = [f"return gl.where({visible}, p, 0.0)"]
        explanation = "Returns probabilities, with zeros for keys that the mask function hides."
        return self.definition("hide_by_function", block, "p", last, explanation)

    def computed(self, block: Block, place: int) -> str:
        """Returns the text of an operation of a block that makes no sum."""
        return self._compared(block, place) or super().computed(block, place)

    def _compared(self, block: Block, place: int) -> str:
        """Returns the text of a comparison of a query with numbers that do not depend on it, if it is one.

        Queries of a thread differ by constants, so that one subtraction for each key is enough.
        """
        node, kinds = self.functions.nodes[place], self.functions.kinds
        if node.op not in _COMPARED or self.forms[place] < 3 or kinds[node.operands[0]] is not Kind.INT:
            return ""
        found = self.compared(place)
        if found is None:
            return ""
        least, greatest, last = -ANY_PLACE.greatest, -ANY_PLACE.least, ""
        for own, row, ends in self.summands(found[1]):
            block.read(row)
            least, greatest = least + ends[0], greatest + ends[1]
            last += f" {'+' if own > 0 else '-'} {row.wide}"
        if least < INT32[0] or greatest > INT32[-1]:
            return ""
        rest = f"{last} - m_start - (queries & 6)[None, :]".removeprefix(" + ").strip()
        sides = "(queries & -7)[None, :]", rest
        return self.pattern(place).format(*sides if found[0] > 0 else sides[::-1])
