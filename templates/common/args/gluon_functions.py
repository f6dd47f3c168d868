"""Gluon code of score and mask functions, written from their typed expressions alone.

Values that do not depend on keys are computed once for a tile of queries: scalars, and rows [GROUP_M] in
ROW_LAYOUT. Others are computed in functions for one block of keys. Classes follow each other: `PlaceWriter`
for values of tiles, `BlockWriter` for those of blocks, `WordWriter` for words of masks, and `GluonWriter` for
the functions.
"""

import textwrap
from collections.abc import Mapping

from flashtune.core.expressions.nodes import Expressions, Functions, Op
from flashtune.templates.common.args.function_lines import HELPERS
from flashtune.templates.common.args.gluon_blocks import Block, Sum, bare
from flashtune.templates.common.args.gluon_places import Row
from flashtune.templates.common.args.gluon_words import CALLED, WordWriter

_LOG2_E = "1.4426950408889634"


def in_gluon(text: str) -> str:
    """Returns a function of Triton as one of Gluon."""
    return text.replace("@triton.", "@gluon.").replace("tl.", "gl.")


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
    **{op: in_gluon(HELPERS[op]) for op in (Op.FLOOR_DIVIDE, Op.LOAD)},
}
_CALLED: Mapping[str, str] = {
    "floor_divide": _HELPERS[Op.FLOOR_DIVIDE],
    "tanh_of": in_gluon(HELPERS[Op.TANH]).replace("LOG2_E", _LOG2_E),
    **CALLED,
}


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


class GluonWriter(WordWriter):
    """Writes functions for blocks of keys, and the values of tiles that these read."""

    # The arguments of functions after a tile and before values of a tile or launch.
    arguments: tuple[str, ...] = ("n_block", "n_offsets", "seqlen_q", "seqlen_kv", "origin")

    def __init__(self, functions: Expressions, *, by_position: bool = False, packed: bool = False) -> None:
        super().__init__(functions, by_position=by_position, packed=packed)
        names = ("functions", "constants", "rows", "score", "mask", "row", "natural", "words")
        self.parts = dict.fromkeys(names, "")
        if functions.score < 0 and functions.mask < 0:
            return
        constants = self.sizes()
        for place, form in enumerate(self.forms):
            if form < 2:
                is_of_launch = not self.depends_on(place, Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY, Op.SCORE)
                (constants if is_of_launch else self.tile).extend(self.lines([place]))
        definitions = [self.helpers(_HELPERS)]
        for part, result, write in (
            ("score", functions.score, self.score_function),
            ("mask", functions.mask, self.mask_function),
        ):
            if result >= 0:
                block = Block()
                definitions.append(write(block))
                self.parts[part] = ", ".join(block.inputs)
        definitions += self.further_functions()
        calling = "\n".join([*definitions, *constants, *self.tile])
        for name, text in reversed([*_CALLED.items()]):
            if f"{name}(" in calling and f"def {name}(" not in calling:
                definitions.insert(1, text)
                calling += text
        self.parts["functions"] = "\n\n".join(text.strip("\n") + "\n" for text in definitions if text)
        self.parts["constants"] = "\n".join(constants)
        self.parts["rows"] = "\n".join(self.tile)

    def further_functions(self) -> list[str]:
        """Returns definitions of functions other than those of all kernels."""
        return []

    def score_function(self, block: Block) -> str:
        """Returns the definition of the function that changes scores."""
        changed = self.sum_of(block, self.functions.score)
        if changed.row is not None and changed.pair:
            # The same term for all keys of a row does not change their weights.
            self.parts["row"] = changed.row.text
            changed = changed._replace(row=None)
        if changed.is_bounded:
            changed = self.scaled(block, changed, Row(_LOG2_E), is_exact=True)
        else:
            self.parts["natural"] = "True"
        lines = [f"s = {self.of_pairs(block, changed)}", "return s"]
        return self.definition("change_scores", block, "s", lines, "Returns scores after the score function.")

    def of_pairs(self, block: Block, changed: Sum) -> str:
        """Returns the text of changed scores, which have the shape of a tile."""
        text = bare(self.text_of(block, changed, 3))
        score = self.functions.score
        is_wide = self.forms[score] == 3 and self.depends_on(score, Op.SCORE)
        return text if is_wide else f"{text} + gl.zeros_like(s)"

    def mask_function(self, block: Block) -> str:
        """Returns the definition of the function that hides pairs."""
        lines: list[str] = []
        words: list[str] = []
        others: list[str] = []
        conditions = self._conditions(self.functions.mask)
        # Words are of rows.
        has_words = any(self.forms[place] == 3 and self.word(block, place) for place in conditions)
        for place in conditions:
            word = self.word(block, place) if has_words else ""
            (words if word else others).append(word or self.operand_of(block, place, 3))
        if words:
            self.parts["words"] = "True"
            lines.append(f"s = select_pairs(s, {' & '.join(words)})")
        if others:
            lines.append(f's = gl.where({" & ".join(others)}, s, float("-inf"))')
        lines.append("return s")
        explanation = "Masks the scores of keys that the mask function hides."
        return self.definition("hide_by_function", block, "s", lines, explanation)

    def _conditions(self, place: int) -> list[int]:
        """Returns the bools of which a bool is the conjunction."""
        node = self.functions.nodes[place]
        if node.op is not Op.AND:
            return [place]
        return [part for own in node.operands for part in self._conditions(own)]

    def definition(self, name: str, block: Block, tile: str, last: list[str], explanation: str) -> str:
        """Returns the definition of a function of a tile of this name, with these last lines."""
        inputs = ", ".join((tile, *self.arguments, *block.inputs))
        if len(inputs) > 80:
            inputs = f"\n{textwrap.indent(textwrap.fill(inputs, 100), '    ')},\n"
        body = textwrap.indent("\n".join((f'"""{explanation}"""', *block.lines, *last)), "    ")
        return f"@gluon.jit\ndef {name}({inputs}):\n{body}\n"
