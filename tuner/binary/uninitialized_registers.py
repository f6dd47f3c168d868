"""Finds uniform registers that machine code reads without a write: errors of the assembler.

The ptxas 12.8 of Triton 3.6 and 3.7 computes tile addresses from such registers in some kernels for Hopper.
The kernel then reads the wrong tile, at an address that a warp of another kernel left in the register.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Sequence

from flashtune.tuner.binary.disassembly import Instruction, blocks_of, parse, successors_of

REGISTER = re.compile(r"\bUR(\d+)\b")
PREDICATE = re.compile(r"!?U?P(\d|T)")
# Registers that one instruction writes, by its modifiers.
WIDTHS = {"64": 2, "WIDE": 2, "128": 4}
# Only reads by these count. Copies and bit operations may read irrelevant values: half of the registers of a
# matrix product, or bits that are cleared before they are set.
ARITHMETIC = frozenset({"UIADD3", "UIMAD", "ULEA"})
# The listing does not contain their targets: warp roles start at addresses from a table. Assume any block.
INDIRECT = frozenset({"BRX", "BRXU", "JMX", "JMXU", "JMP", "RET", "CALL"})


def unwritten(listing: str) -> str:
    """Returns the first arithmetic on a uniform register that may be unwritten; empty if there is none.

    One path through the code without a write is enough, even if it is never executed.

    Args:
        listing: Machine code of one kernel, as `cuobjdump --dump-sass` prints it.
    """
    code = dict(parse(listing.splitlines()))
    blocks = blocks_of(code)
    uses = {address: _uses(instruction) for address, instruction in code.items()}
    wrote = [_union(uses[address][1] for address in block) for block in blocks]
    for place, arriving in sorted(_arriving(_followers(code, blocks), wrote).items()):
        written = arriving
        for address in blocks[place]:
            read, writes = uses[address]
            if read & ~written:
                instruction = code[address]
                words = ".".join((instruction.name, *instruction.modifiers))
                return f"{words} {', '.join(instruction.operands)} at {address:#x}"
            written |= writes
    return ""


def _followers(code: dict[int, Instruction], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns each block's possible successors; all blocks if they are unknown."""
    anywhere = list(range(len(blocks)))
    return [
        anywhere if any(code[address].name in INDIRECT for address in block) else after
        for block, after in zip(blocks, successors_of(code, blocks), strict=True)
    ]


def _arriving(followers: Sequence[Sequence[int]], wrote: Sequence[int]) -> dict[int, int]:
    """Returns for each reachable block the registers, as bits, that were written on some path to it."""
    arriving = {0: 0} if followers else {}
    waiting = list(arriving)
    while waiting:
        place = waiting.pop()
        leaving = arriving[place] | wrote[place]
        for other in followers[place]:
            if other not in arriving or leaving & ~arriving[other]:
                arriving[other] = arriving.get(other, 0) | leaving
                waiting.append(other)
    return arriving


def _uses(instruction: Instruction) -> tuple[int, int]:
    """Returns the uniform registers that an instruction's arithmetic reads and writes, as bits."""
    operands = list(instruction.operands)
    while operands and PREDICATE.fullmatch(operands[0]):
        operands.pop(0)
    written = 0
    # Comparisons write only predicates.
    if operands and not instruction.name.endswith("SETP"):
        found = REGISTER.fullmatch(operands[0])
        if found:
            width = max((WIDTHS.get(modifier, 1) for modifier in instruction.modifiers), default=1)
            written = ((1 << width) - 1) << int(found[1])
            operands.pop(0)
    if instruction.name not in ARITHMETIC:
        return 0, written
    named = (REGISTER.findall(operand) for operand in operands)
    return _union(1 << int(number) for numbers in named for number in numbers), written


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)
