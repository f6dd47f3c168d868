"""The Triton kernel that lists the blocks of a mask function, written from the typed expression alone.

It computes bounds of each node by the functions of `flashtune.launch.interval_arithmetic`, for blocks of
queries and of keys. A bound has the shape [1, 1], [ROWS, 1], [1, COLUMNS] or [ROWS, COLUMNS]. Elements of a
captured tensor are loaded for one block, and their least and greatest are taken.
"""

from __future__ import annotations

import textwrap

from flashtune.core.expressions.nodes import Functions, Kind, Op, float_of
from flashtune.core.features.records import TABLES
from flashtune.templates.common.args.function_lines import Writer

ENTRY = "list_visible_blocks"
LISTS = ("block_counts", "block_indices", "full_counts")
EXTENTS = ("list_heads", "seqlen_q", "seqlen_kv")
# Blocks of queries of a program, and blocks of keys that it classifies at once.
ROWS, COLUMNS = 4, 64
_TYPES = {Kind.INT: "tl.int64", Kind.FLOAT: "tl.float32", Kind.BOOL: "tl.int1"}
# Bounds of a value of which nothing is known.
_UNKNOWN = {Kind.INT: ("LEAST", "GREATEST"), Kind.FLOAT: ('float("nan")',) * 2, Kind.BOOL: ("True", "True")}
_SOURCE = '''"""Lists the blocks of keys that a mask function may show, by bounds of its values."""

import triton
import triton.language as tl

from flashtune.launch.interval_arithmetic import *

BLOCK = tl.constexpr({block_size})
ROWS, COLUMNS = tl.constexpr({ROWS}), tl.constexpr({COLUMNS})


@triton.jit
def {ENTRY}({parameters}):
    """Writes lists of some blocks of queries: the blocks that the mask shows in full, and then in part."""
    query_blocks, key_blocks = tl.cdiv(seqlen_q, BLOCK), tl.cdiv(seqlen_kv, BLOCK)
    programs = tl.cdiv(query_blocks, ROWS)
    rows = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    list_head = tl.program_id(0) // programs
    lists = list_head.to(tl.int64) * query_blocks + rows
    batch = tl.full([1, 1], 0, tl.int64) + list_head // list_heads
    head = tl.full([1, 1], 0, tl.int64) + list_head % list_heads
    first_query = tl.minimum(rows * BLOCK, seqlen_q - 1).to(tl.int64)[:, None]
    last_query = tl.minimum(rows * BLOCK + BLOCK, seqlen_q).to(tl.int64)[:, None] - 1
    {of_rows}
    n_listed, n_full = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    steps = tl.cdiv(key_blocks, COLUMNS)
    # Full blocks are listed in the first round, and others in the second one.
    for step in range(2 * steps):
        blocks = step % steps * COLUMNS + tl.arange(0, COLUMNS)
        first_key = tl.minimum(blocks * BLOCK, seqlen_kv - 1).to(tl.int64)[None, :]
        last_key = tl.minimum(blocks * BLOCK + BLOCK, seqlen_kv).to(tl.int64)[None, :] - 1
        {of_blocks}
        exists = (rows < query_blocks)[:, None] & (blocks < key_blocks)[None, :]
        # The last block of keys is not full if some of them do not exist.
        is_full = exists & ({no} == 0) & (blocks * BLOCK + BLOCK <= seqlen_kv)[None, :]
        is_listed = exists & {yes} & (is_full.to(tl.int32) == tl.where(step < steps, 1, 0))
        places = n_listed[:, None] + tl.cumsum(is_listed.to(tl.int32), 1) - 1
        entries = block_indices + lists[:, None] * key_blocks + places
        tl.store(entries, blocks[None, :] + places * 0, mask=is_listed)
        n_listed += tl.sum(is_listed.to(tl.int32), 1)
        n_full = tl.where(step < steps, n_listed, n_full)
    tl.store(block_counts + lists, n_listed, mask=rows < query_blocks)
    tl.store(full_counts + lists, n_full, mask=rows < query_blocks)
'''


def listing_source(functions: Functions, parameters: tuple[str, ...], block_size: int) -> str:
    """Returns the source of a module with the kernel `ENTRY` for a mask function."""
    writer = _IntervalWriter(functions)
    needed = functions.needed(functions.mask)
    of_rows, of_blocks = (
        "\n".join(
            line for place in needed if (writer.forms[place] >= 2) is is_block for line in writer.of(place)
        )
        for is_block in (False, True)
    )
    no, yes = writer.names(functions.mask)
    return _SOURCE.format(
        ENTRY=ENTRY,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        block_size=block_size,
        parameters=", ".join(parameters),
        of_rows=textwrap.indent(of_rows, " " * 4).strip(),
        of_blocks=textwrap.indent(of_blocks, " " * 8).strip(),
        no=no,
        yes=yes,
    )


class _IntervalWriter(Writer):
    """Names and lines of bounds."""

    def names(self, place: int) -> tuple[str, str]:
        """Returns the names of a node's two bounds."""
        words = ("no", "yes") if self.functions.kinds[place] is Kind.BOOL else ("least", "greatest")
        return f"{words[0]}_{place}", f"{words[1]}_{place}"

    def of(self, place: int) -> list[str]:
        """Returns the lines that compute a node's bounds."""
        if self.functions.nodes[place].op is Op.LOAD:
            return self._of_load(place)
        names = self.names(place)
        if self.functions.nodes[place].op is Op.NOT_EQUAL:
            names = names[::-1]
        return [f"{', '.join(names)} = {self._bounds(place)}"]

    def _constants(self, kind: Kind, *texts: str) -> str:
        return ", ".join(f"tl.full([1, 1], {text}, {_TYPES[kind]})" for text in texts)

    def _bounds(self, place: int) -> str:
        """Returns the text of a node's bounds, from those of its operands."""
        node, kind = self.functions.nodes[place], self.functions.kinds[place]
        match node.op:
            case Op.BOOL:
                return self._constants(kind, str(not node.value), str(bool(node.value)))
            case Op.INT:
                return self._constants(kind, *[str(node.value)] * 2)
            case Op.FLOAT:
                return self._constants(kind, *[f'float("{float_of(node.value)!r}")'] * 2)
            case Op.INT_NUMBER | Op.FLOAT_NUMBER:
                array = "function_ints" if node.op is Op.INT_NUMBER else "function_floats"
                return ", ".join([f"tl.full([1, 1], tl.load({array} + {node.value}), {_TYPES[kind]})"] * 2)
            case Op.BATCH | Op.HEAD:
                return f"{node.op}, {node.op}"
            case Op.QUERY | Op.KEY:
                return f"first_{node.op}, last_{node.op}"
        operands = [self.names(operand) for operand in node.operands]
        if node.op is Op.NOT:
            return ", ".join(reversed(operands[0]))
        text = ", ".join(name for pair in operands for name in pair)
        of = self.functions.kinds[node.operands[-1]]
        match node.op:
            case Op.LESS | Op.LESS_EQUAL:
                return f"{node.op}({text})"
            case Op.EQUAL | Op.NOT_EQUAL:
                # The bounds of "not equal" are those in the other order.
                return f"{'bool_' if of is Kind.BOOL else ''}equal({text})"
            case Op.COS:
                return f"float_sin({text})"
        return f"{of.name.lower()}_{node.op}({text})"

    def _of_load(self, place: int) -> list[str]:
        """Returns the lines of the bounds of a captured tensor's elements.

        One of the indices, the last one that depends on positions, may have several values.
        """
        node, kind = self.functions.nodes[place], self.functions.kinds[place]
        both = ", ".join(self.names(place))
        if self.forms[place] == 3:
            # There would be elements for each pair of blocks.
            return [f"{both} = {self._constants(kind, *_UNKNOWN[kind])}"]
        wide = max(
            (axis for axis, index in enumerate(node.operands) if self.forms[index]),
            default=len(node.operands) - 1,
        )
        state = f"at_{place}, count_{place}, known_{place}"
        lines, step = [f"{state} = no_index(batch)"], "0"
        for axis, index in enumerate(node.operands):
            first = self.shapes[node.value] + axis
            size, stride = (f"tl.load(function_ints + {first + own})" for own in (0, len(node.operands)))
            if axis == wide:
                step = stride
            arguments = ", ".join((state, *self.names(index), size, stride))
            lines.append(f"{state} = {'wide' if axis == wide else 'single'}_index({arguments})")
        arguments = f"{TABLES[node.value]}, {state}, {step}, {'BLOCK' if self.forms[place] else 1}"
        return [*lines, f"{both} = {kind.name.lower()}_elements({arguments})"]
