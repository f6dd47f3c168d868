"""Clears the rows after the last packed sequence, which attention kernels do not write.

Only the device knows where the last sequence ends. A kernel reads it, so that the host does not wait. The
kernel comes from a bundle, otherwise from Triton.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtune.bundle.program import evaluate
from flashtune.bundle.records import Instruction, Plan
from flashtune.core import VERSION
from flashtune.core.layouts import DTYPES
from flashtune.launch.launcher import Queue, current_stream, queue_of

# The largest number of programs.
PROGRAMS = 1024
# Clears an output [tokens, heads, width] and its log-sum-exp [heads, tokens], by the starts of the sequences.
Clear = Callable[..., None]
PLAN = Plan(
    ("out", "lse", "starts"),
    (
        Instruction("size", 0, 0), Instruction("size", 0, 1), Instruction("size", 0, 2),
        Instruction("size", 1, 0), Instruction("size", 2, 0), Instruction("const", 1),
        Instruction("sub", 4, 5), Instruction("mul", 0, 1), Instruction("const", PROGRAMS),
        Instruction("min", 7, 8), Instruction("max", 9, 5), Instruction("const", 0),
    ),
)  # fmt: skip
# Positions of the kernel's integers (sequences, tokens, heads, width, and 0 without a log-sum-exp), of the
# number of programs, and of a null pointer.
INTEGERS, GRID, NULL = (6, 0, 1, 2, 3), 10, 11


def tail_recipe(dtype: torch.dtype) -> str:
    """Returns a hash of all on which the kernel for outputs of a type depends, 32 hex digits."""
    source = Path(__file__).with_name("tail_kernel.py").read_bytes()
    return hashlib.sha256(f"{VERSION} {DTYPES[dtype]} ".encode() + source).hexdigest()[:32]


def tail_clearer(binary: Any, out: Tensor, has_lse: bool, sequences: int, device: torch.device) -> Clear:
    """Returns the function for contiguous outputs like `out`.

    `binary` is the kernel of `compile_clear` or of a bundle.
    """
    sizes: list[Sequence[int]] = [out.shape, out.shape[1:2] if has_lse else (0,), (sequences + 1,)]
    values = evaluate(PLAN, [(size, ()) for size in sizes], 1)
    index = device.index
    if isinstance(binary, tuple):
        entry, (function,), driver = binary
        (stage,) = entry.stages
        run = driver.queue(function, stage, (values[GRID],), values, 0, index)
        queue = Queue(run, (), (), as_one=True)
    else:
        queue = queue_of(binary, (values[GRID],), tuple(values[number] for number in INTEGERS), device)

    def clear(out: Tensor, lse: Tensor | None, starts: Tensor) -> None:
        # A call without a log-sum-exp passes another address, which the kernel does not use.
        run, before, after, as_one, numbers, _ = queue
        own = out.data_ptr(), (out if lse is None else lse).data_ptr(), starts.data_ptr(), *numbers
        if as_one:
            run(*before, current_stream(index), *after, own)
        else:
            run(*before, current_stream(index), *after, *own)

    return clear
