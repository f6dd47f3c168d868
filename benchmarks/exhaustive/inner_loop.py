"""The inner loop of a kernel's machine code: its instructions and their issue time."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from flashtune.tuner.binary.disassembly import Instruction, blocks_of, dump, parse, successors_of

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=16)]

# Matrix instructions on Volta and later, of warps and of groups of warps.
MATRIX = frozenset({"HMMA", "HGMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA"})


class Loop(msgspec.Struct, frozen=True, array_like=True):
    """The innermost loop with the most matrix products."""

    instructions: dict[Name, Count]  # Number of each instruction in it, without modifiers.
    cycles: Count  # Sum of the stall cycles of its instructions.


def read_loop(cubin: bytes) -> Loop | None:
    """Returns the inner loop of a binary, None if no loop contains matrix products."""
    return find_loop(dump(cubin, "--dump-sass"))


def find_loop(listing: str) -> Loop | None:
    """Returns the inner loop in a listing of machine code."""
    code = dict(parse(listing.splitlines()))
    blocks = blocks_of(code)
    bodies = [body for body in loops(successors_of(code, blocks)) if _products(code, blocks, body)]
    inner = [body for body in bodies if not any(other < body for other in bodies)]
    if not inner:
        return None
    body = max(inner, key=lambda body: (_products(code, blocks, body), len(body)))
    instructions = [code[address] for block in body for address in blocks[block]]
    counts = Counter(instruction.name for instruction in instructions)
    return Loop(dict(sorted(counts.items())), sum(max(1, instruction.stall) for instruction in instructions))


def loops(successors: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """Returns the natural loops of a flow graph. Loops with one head count as one."""
    size = len(successors)
    predecessors: list[list[int]] = [[] for _ in range(size)]
    for block, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(block)
    dominators = _dominators(predecessors)
    bodies: dict[int, set[int]] = {}
    for block, targets in enumerate(successors):
        for head in targets:
            if dominators[block] >> head & 1:
                bodies.setdefault(head, {head}).update(_reaching(block, head, predecessors))
    return [frozenset(body) for body in bodies.values()]


def _dominators(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each block the set, as bits, of blocks on every path to it.

    A block without a jump to it is an entry: warp roles start at addresses from a table.
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
    """Returns the blocks that reach a block without passing a head."""
    body: set[int] = set()
    waiting = [block]
    while waiting:
        block = waiting.pop()
        if block != head and block not in body:
            body.add(block)
            waiting += predecessors[block]
    return body


def _products(code: dict[int, Instruction], blocks: list[list[int]], body: frozenset[int]) -> int:
    return sum(code[address].name in MATRIX for block in body for address in blocks[block])
