"""Machine code as `cuobjdump` lists it: instructions, basic blocks, and reads of unwritten registers.

The ptxas 12.8 of Triton 3.6 and 3.7 computes tile addresses from unwritten uniform registers in some kernels
for Hopper. The kernel then reads the wrong tile, at an address that a warp of another kernel left in the
register.
"""

import functools
import operator
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.machine import machine_errors, written_folder_fault

TOOL_SECONDS = 120

# An instruction's address, an optional predicate, its name with modifiers, its operands, its low word.
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
# The next line has only the high word.
HIGH_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
TARGET = re.compile(r"0x([0-9a-f]+)")
# Bits of an instruction's high word with the cycles that its warp waits before the next one.
STALL_SHIFT, STALL_MASK = 41, 0xF
# No instruction follows these, unless they have a condition.
ENDS = frozenset({"EXIT", "RET", "BRX", "JMX", "JMP", "KILL"})

REGISTER = re.compile(r"\bUR(\d+)\b")
PREDICATE = re.compile(r"!?U?P(\d|T)")
# Registers that one instruction writes, by its modifiers.
WIDTHS = {"64": 2, "WIDE": 2, "128": 4}
# Only reads by these count. Copies and bit operations may read irrelevant values: half of the registers of a
# matrix product, or bits that are cleared before they are set.
ARITHMETIC = frozenset({"UIADD3", "UIMAD", "ULEA"})
# The listing does not contain their targets: warp roles start at addresses from a table. Assume any block.
INDIRECT = frozenset({"BRX", "BRXU", "JMX", "JMXU", "JMP", "RET", "CALL"})


def dump(cubin: bytes, what: str) -> str:
    """Returns the output of `cuobjdump` for a binary, such as `--dump-sass` for its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        with machine_errors():
            Path(file.name).write_bytes(cubin)
        return run_tool(tool_path("cuobjdump"), what, file.name)


def tool_path(name: str) -> str:
    """Returns the path of a tool that Triton ships."""
    from triton import knobs

    try:
        with machine_errors():
            return str(getattr(knobs.nvidia, name).path)
    except RuntimeError as error:
        raise MachineError(f"this installation of Triton has no {name}: reinstall triton") from error


def run_tool(*command: str) -> str:
    """Returns the standard output and error of one of the compiler's tools."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        fault = written_folder_fault()
        if fault:
            raise MachineError(fault) from error
        name = Path(command[0]).name
        if isinstance(error, subprocess.CalledProcessError) and error.stderr:
            raise KernelError(f"{name} failed: {error.stderr.strip().splitlines()[-1]}") from error
        raise KernelError(f"{name} failed ({type(error).__name__}): reinstall triton") from error
    return done.stdout + done.stderr


class Instruction(NamedTuple):
    """One instruction."""

    name: str  # Name without modifiers.
    target: int | None  # Address of a jump.
    goes_on: bool  # Whether the next one may follow.
    stall: int  # Clock cycles that its warp waits before that.
    modifiers: tuple[str, ...]  # Parts of its name after dots.
    operands: tuple[str, ...]  # The operands as listed.


def parse(lines: Iterable[str]) -> Iterator[tuple[int, Instruction]]:
    """Returns the instructions of the first function, by address."""
    pending: tuple[int, Instruction] | None = None
    for line in lines:
        match = LINE.search(line)
        if match:
            address, predicate, name, modifiers, operands = match.groups()
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
    places = {block[0]: number for number, block in enumerate(blocks)}
    successors = []
    for number, block in enumerate(blocks):
        last = code[block[-1]]
        after = [number + 1] if last.goes_on and number + 1 < len(blocks) else []
        jumps = [places[last.target]] if last.target in places else []
        successors.append(after + jumps)
    return successors


def unwritten(listing: str) -> str:
    """Returns the first arithmetic on a uniform register that may be unwritten; empty if there is none.

    One path through the code without a write is enough, even if it is never executed. The listing is that of
    one kernel, as `cuobjdump --dump-sass` prints it.
    """
    code = dict(parse(listing.splitlines()))
    blocks = blocks_of(code)
    uses = {address: _uses(instruction) for address, instruction in code.items()}
    wrote = [_union(uses[address][1] for address in block) for block in blocks]
    for number, arriving in sorted(_arriving(_followers(code, blocks), wrote).items()):
        written = arriving
        for address in blocks[number]:
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
        number = waiting.pop()
        leaving = arriving[number] | wrote[number]
        for other in followers[number]:
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
        register = REGISTER.fullmatch(operands[0])
        if register:
            width = max((WIDTHS.get(modifier, 1) for modifier in instruction.modifiers), default=1)
            written = ((1 << width) - 1) << int(register[1])
            operands.pop(0)
    if instruction.name not in ARITHMETIC:
        return 0, written
    named = (REGISTER.findall(operand) for operand in operands)
    return _union(1 << int(number) for numbers in named for number in numbers), written


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)
