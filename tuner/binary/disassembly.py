"""Machine code as `cuobjdump` lists it: instructions, basic blocks and their successors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# An instruction's address, an optional predicate, its name with modifiers, its operands, its low word.
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
# The next line has only the high word.
HIGH_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
TARGET = re.compile(r"0x([0-9a-f]+)")
# Bits of an instruction's high word with the cycles that its warp waits before the next one.
STALL_SHIFT, STALL_MASK = 41, 0xF
# No instruction follows these, unless they have a condition.
ENDS = frozenset({"EXIT", "RET", "BRX", "JMX", "JMP", "KILL"})


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: Name without modifiers.
        target: Address of a jump.
        goes_on: Whether the next one may follow.
        stall: Clock cycles that its warp waits before that.
        modifiers: Parts of its name after dots.
        operands: The operands as listed.
    """

    name: str
    target: int | None
    goes_on: bool
    stall: int
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]


def parse(lines: Iterable[str]) -> Iterator[tuple[int, Instruction]]:
    """Returns the instructions of the first function, by address."""
    pending: tuple[int, Instruction] | None = None
    for line in lines:
        found = LINE.search(line)
        if found:
            address, predicate, name, modifiers, operands = found.groups()
            if pending:
                yield pending
                if int(address, 16) <= pending[0]:
                    return
            targets = TARGET.findall(operands) if name == "BRA" else []
            # A branch may name its condition as a predicate or among its operands.
            certain = predicate is None and (name in ENDS or (name == "BRA" and "," not in operands))
            target = int(targets[-1], 16) if targets else None
            listed = tuple(operand.strip() for operand in operands.split(","))
            said = tuple(modifiers.split(".")[1:])
            pending = int(address, 16), Instruction(name, target, not certain, 1, said, listed)
        elif pending and (high := HIGH_WORD.match(line)):
            stall = int(high.group(1), 16) >> STALL_SHIFT & STALL_MASK
            pending = pending[0], pending[1]._replace(stall=stall)
    if pending:
        yield pending


def blocks_of(code: dict[int, Instruction]) -> list[list[int]]:
    """Returns the addresses of each basic block."""
    starts = {instruction.target for instruction in code.values()}
    blocks: list[list[int]] = [[]]
    for address, instruction in code.items():
        if address in starts and blocks[-1]:
            blocks.append([])
        blocks[-1].append(address)
        if instruction.target is not None or not instruction.goes_on:
            blocks.append([])
    return [block for block in blocks if block]


def successors_of(code: dict[int, Instruction], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the indices of each block's possible successors."""
    places = {block[0]: place for place, block in enumerate(blocks)}
    successors = []
    for place, block in enumerate(blocks):
        last = code[block[-1]]
        after = [place + 1] if last.goes_on and place + 1 < len(blocks) else []
        jumps = [places[last.target]] if last.target in places else []
        successors.append(after + jumps)
    return successors
