"""The kernel that clears the rows after the last packed sequence, compiled by Triton."""

# Triton passes untyped arguments: addresses and numbers.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from typing import Any

import torch
import triton
import triton.language as tl

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.layouts import DTYPES
from flashtune.core.machine import machine_errors
from flashtune.core.target import Target
from flashtune.launch.compilation import compile_source, first_line

# Columns that a program clears at once.
COLUMNS = tl.constexpr(256)
WARPS = 4
NUMBERS = ("sequences", "tokens", "heads", "width", "has_lse")


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


def compile_clear(dtype: torch.dtype, target: Target) -> Any:
    """Returns the binary for outputs of a type."""
    from triton.compiler import ASTSource

    pointers = {"out": f"*{DTYPES[dtype].value}", "lse": "*fp32", "starts": "*i32"}
    source = ASTSource(clear_tail, pointers | dict.fromkeys(NUMBERS, "i32"), {}, {})
    options = {"num_warps": WARPS, "num_stages": 1}
    try:
        with machine_errors():
            return compile_source(source, target, options)
    except MachineError:
        raise
    except Exception as error:  # the compiler raises many types
        raise KernelError(first_line(error)) from error
