"""The inner loop of a kernel's machine code: which instructions, and how long they take to issue."""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from flashtune.tuner.resources import run_tool, tool_path

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=16)]

# An instruction's address, an optional predicate, its name with modifiers, its operands, its low word.
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
# The next line has nothing but the high word.
HIGH_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
TARGET = re.compile(r"0x([0-9a-f]+)")
# Where an instruction's high word says for how many cycles the next one of its warp waits.
STALL_SHIFT, STALL_MASK = 41, 0xF
# After these nothing goes on, unless they have a condition.
ENDS = frozenset({"EXIT", "RET", "BRX", "JMX", "JMP", "KILL"})
# What multiplies matrices on Volta and later, by warps and by groups of warps.
MATRIX = frozenset({"HMMA", "HGMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA"})


class Loop(msgspec.Struct, frozen=True, array_like=True):
    """The innermost loop with the most matrix products.

    Attributes:
        instructions: How often each instruction occurs in it, modifiers left out.
        cycles: What its instructions make their warp wait before the next one, in clock cycles.
    """

    instructions: dict[Name, Count]
    cycles: Count


class _Instruction(NamedTuple):
    """One instruction: where it may jump to, whether it may also go on, its wait in clock cycles."""

    name: str
    target: int | None
    goes_on: bool
    stall: int


def read_loop(cubin: bytes) -> Loop | None:
    """The inner loop of a binary; None where no loop holds matrix products.

    Raises:
        KernelError: The tool that lists machine code failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return find_loop(run_tool(tool_path("cuobjdump"), "--dump-sass", file.name))


def find_loop(listing: str) -> Loop | None:
    """The inner loop in a listing of machine code."""
    code = dict(_parse(listing.splitlines()))
    blocks = _blocks(code)
    bodies = [body for body in loops(_successors(code, blocks)) if _products(code, blocks, body)]
    inner = [body for body in bodies if not any(other < body for other in bodies)]
    if not inner:
        return None
    body = max(inner, key=lambda body: (_products(code, blocks, body), len(body)))
    instructions = [code[address] for block in body for address in blocks[block]]
    counts = Counter(instruction.name for instruction in instructions)
    return Loop(dict(sorted(counts.items())), sum(max(1, instruction.stall) for instruction in instructions))


def loops(successors: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """The natural loops of a flow graph: those of one head count as one.

    A branch back to where every way to it came through closes a loop. What merely lies before in
    memory does not: waits are retried in blocks of their own behind everything else.
    """
    size = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(size)]
    for block, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(block)
    dominators = _dominators(predecessors)
    found: dict[int, set[int]] = {}
    for block, targets in enumerate(successors):
        for head in targets:
            if dominators[block] >> head & 1:
                found.setdefault(head, {head}).update(_reaching(block, head, predecessors))
    return [frozenset(body) for body in found.values()]


def _dominators(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """For each block the set, as bits, of blocks that every way to it passes.

    A block that nobody jumps to is an entry: roles of warps begin at addresses out of a table.
    """
    everything = (1 << len(predecessors)) - 1
    sets = [everything if before else 1 << block for block, before in enumerate(predecessors)]
    if sets:
        sets[0] = 1
    changed = True
    while changed:
        changed = False
        for block, before in enumerate(predecessors):
            if block == 0 or not before:
                continue
            common = functools.reduce(int.__and__, (sets[other] for other in before)) | 1 << block
            changed |= common != sets[block]
            sets[block] = common
    return sets


def _reaching(block: int, head: int, predecessors: Sequence[Sequence[int]]) -> set[int]:
    """The blocks that reach a block without passing a head."""
    body: set[int] = set()
    waiting = [block]
    while waiting:
        block = waiting.pop()
        if block != head and block not in body:
            body.add(block)
            waiting += predecessors[block]
    return body


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, _Instruction]]:
    """The instructions of the first function, by address."""
    pending: tuple[int, _Instruction] | None = None
    for line in lines:
        found = LINE.search(line)
        if found:
            address, predicate, name, _, operands = found.groups()
            if pending:
                yield pending
                if int(address, 16) <= pending[0]:
                    return
            targets = TARGET.findall(operands) if name == "BRA" else []
            # A branch may name its condition as a predicate in front or among its operands.
            certain = predicate is None and (name in ENDS or (name == "BRA" and "," not in operands))
            target = int(targets[-1], 16) if targets else None
            pending = int(address, 16), _Instruction(name, target, not certain, 1)
        elif pending and (high := HIGH_WORD.match(line)):
            stall = int(high.group(1), 16) >> STALL_SHIFT & STALL_MASK
            pending = pending[0], pending[1]._replace(stall=stall)
    if pending:
        yield pending


def _blocks(code: dict[int, _Instruction]) -> list[list[int]]:
    """Addresses of each run of instructions that is entered at its start and left at its end."""
    starts = {instruction.target for instruction in code.values()}
    blocks: list[list[int]] = [[]]
    for address, instruction in code.items():
        if address in starts and blocks[-1]:
            blocks.append([])
        blocks[-1].append(address)
        if instruction.target is not None or not instruction.goes_on:
            blocks.append([])
    return [block for block in blocks if block]


def _successors(code: dict[int, _Instruction], blocks: list[list[int]]) -> list[list[int]]:
    places = {block[0]: place for place, block in enumerate(blocks)}
    successors = []
    for place, block in enumerate(blocks):
        last = code[block[-1]]
        after = [place + 1] if last.goes_on and place + 1 < len(blocks) else []
        jumps = [places[last.target]] if last.target in places else []
        successors.append(after + jumps)
    return successors


def _products(code: dict[int, _Instruction], blocks: list[list[int]], body: frozenset[int]) -> int:
    return sum(code[address].name in MATRIX for block in body for address in blocks[block])
