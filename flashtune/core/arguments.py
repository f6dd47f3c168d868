"""Checks of single arguments: numbers, flags, names. Each error is one sentence of bounded length."""

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashtune.core.errors import ProblemError

# The largest finite float32: kernels take numbers in this type.
MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
MAX_TOKENS = 2**31 - 1
MAX_DIGITS = 20
MAX_TEXT = 60

Answer = TypeVar("Answer")


def checked(compute: Callable[..., Answer], check: Callable[..., object], *arguments: Any) -> Answer:
    """Returns `compute(*arguments)`. If that fails, calls `check(*arguments)` for an error with a reason."""
    try:
        return compute(*arguments)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        # The key of the call cache, or an operator, raises these for arguments of a wrong type.
        check(*arguments)
        raise


def shown(value: object) -> str:
    """Returns a short text of a value for error messages. Runs no code of the value's type."""
    if type(value) is int and abs(value) >= 10**MAX_DIGITS:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str and len(value) > MAX_TEXT:
        return f"a string of {len(value)} characters"
    if value is None or type(value) in (bool, int, float, str):
        return ascii(value)
    if type(value) is tuple and len(value) <= 4:
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    return kind_of(value)


def kind_of(value: object) -> str:
    """Returns the name of a value's type for error messages."""
    return f"a {type(value).__name__[:MAX_TEXT]}"


def read_count(name: str, value: object, what: str, least: int = 0, most: int = MAX_TOKENS) -> int:
    """Returns an argument that is a count.

    The name, and `what`, a description of valid values, are for the error.
    """
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise ProblemError(f"{name} cannot be {shown(value)}: pass {what}")
    # torch.compile traces with symbolic integers.
    count = value if isinstance(value, (int, torch.SymInt)) else int(value)
    if not least <= count <= most:
        raise ProblemError(f"{name} cannot be {shown(count)}: pass {what}")
    return count  # type: ignore[return-value]


def read_flag(name: str, value: object) -> bool:
    """Returns a boolean argument."""
    if isinstance(value, bool):
        return value
    raise ProblemError(f"{name} cannot be {shown(value)}: pass True or False")


def read_scale(scale: object) -> float | None:
    """Returns the factor of the scores, or None for the default."""
    if scale is None:
        return None
    if isinstance(scale, (torch.SymFloat, torch.SymInt)):
        return scale  # type: ignore[return-value]
    # Compare before the conversion: an integer can be larger than any float.
    if isinstance(scale, numbers.Real) and -MAX_FLOAT32 <= scale <= MAX_FLOAT32:  # type: ignore[operator]
        return float(scale)
    raise ProblemError(
        f"scale cannot be {shown(scale)}: pass a finite number, or None for 1 / sqrt(head_dim)"
    )
