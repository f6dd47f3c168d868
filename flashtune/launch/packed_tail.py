"""Clears the rows after the last packed sequence, which attention kernels do not write.

Only the device knows where the last sequence ends. A kernel reads it, so that the host does not wait.
"""

# Triton passes untyped arguments: addresses and numbers.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.layouts import DTYPES
from flashtune.core.machine import machine_errors
from flashtune.core.target import Target
from flashtune.launch.compilation import first_line
from flashtune.launch.launcher import current_stream, queue_of

# Columns that a program clears at once, and the largest number of programs.
COLUMNS = tl.constexpr(256)
PROGRAMS = 1024
WARPS = 4
NUMBERS = ("sequences", "tokens", "heads", "width", "has_lse")
# Clears an output [tokens, heads, width] and its log-sum-exp [heads, tokens], by the starts of the sequences.
Clear = Callable[..., None]


@triton.jit
def clear_tail(out, lse, starts, sequences, tokens, heads, width, has_lse):
    """Writes zeros to out [tokens, heads, width] and -inf to lse [heads, tokens] from the last start on."""
    # Invalid starts may be negative.
    first = tl.maximum(tl.load(starts + sequences), 0).to(tl.int64) * heads
    columns = tl.arange(0, COLUMNS)
    nothing = tl.zeros([COLUMNS], tl.float32).to(out.dtype.element_ty)
    for row in range(first + tl.program_id(0), tokens.to(tl.int64) * heads, tl.num_programs(0)):
        for column in range(0, width, COLUMNS):
            tl.store(out + row * width + column + columns, nothing, mask=column + columns < width)
        if has_lse != 0:
            tl.store(lse + row % heads * tokens + row // heads, float("-inf"))


def tail_clearer(compiled: Any, out: Tensor, has_lse: bool, sequences: int, device: torch.device) -> Clear:
    """Returns the function for contiguous outputs like `out`, and loads the kernel of `compile_clear`."""
    tokens, heads, width = out.shape
    grid = (min(PROGRAMS, max(1, tokens * heads)),)
    integers = (sequences, tokens, heads, width, int(has_lse))
    queue = queue_of(compiled, grid, integers, device)
    index = device.index

    def clear(out: Tensor, lse: Tensor | None, starts: Tensor) -> None:
        # A call without a log-sum-exp passes another address, which the kernel does not use.
        run, before, after, as_one, numbers, _ = queue
        own = out.data_ptr(), (out if lse is None else lse).data_ptr(), starts.data_ptr(), *numbers
        if as_one:
            run(*before, current_stream(index), *after, own)
        else:
            run(*before, current_stream(index), *after, *own)

    return clear


def compile_clear(dtype: torch.dtype, target: Target) -> Any:
    """Returns the binary for outputs of a type."""
    from triton.compiler import ASTSource

    pointers = {"out": f"*{DTYPES[dtype].value}", "lse": "*fp32", "starts": "*i32"}
    source = ASTSource(clear_tail, pointers | dict.fromkeys(NUMBERS, "i32"), {}, {})
    options = {"num_warps": WARPS, "num_stages": 1}
    try:
        with machine_errors():
            return triton.compile(source, target=target.triton_target(), options=options)
    except MachineError:
        raise
    except Exception as error:  # the compiler raises many types
        raise KernelError(first_line(error)) from error
