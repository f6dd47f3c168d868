"""Checks of single arguments of a call, and their conversion. All errors are of type `ProblemError`."""

from __future__ import annotations

import enum
from typing import TypeVar

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32, MIN_FLOAT32, read_count, shown
from flashtune.core.errors import ProblemError
from flashtune.core.problem import Causal

Bound = int | None
Window = tuple[Bound, Bound]

NO_WINDOW: Window = (None, None)
# The largest float32 below one.
MAX_DROPOUT = 1.0 - 2.0**-24

Option = TypeVar("Option", bound=enum.StrEnum)


def read_causal(causal: object) -> str:
    """Returns the value of `Causal`. `True` means bottom-right, as in flash_attn.

    Raises:
        ProblemError: The argument is neither a bool nor the name of an alignment.
    """
    if causal is True:
        return "bottom_right"
    if causal is False:
        return "none"
    if isinstance(causal, str) and causal in list(Causal):
        return causal
    raise ProblemError(f"causal cannot be {shown(causal)}: pass False, True, 'top_left' or 'bottom_right'")


def read_option(name: str, value: object, known: tuple[Option, ...]) -> Option:
    """Returns the known value of an option.

    Raises:
        ProblemError: The value is unknown.
    """
    for choice in known:
        if isinstance(value, str) and value == choice:
            return choice
    choices = " or ".join(repr(choice.value) for choice in known)
    raise ProblemError(f"{name} cannot be {shown(value)}: pass {choices}")


def read_window(window: object) -> Window:
    """Returns both bounds of a window; None means unbounded.

    Raises:
        ProblemError: The window is not a pair of numbers of keys.
    """
    if window is None:
        return NO_WINDOW
    if not isinstance(window, tuple) or len(window) != 2:
        raise ProblemError(
            f"window cannot be {shown(window)}: pass (left, right), the keys that a query sees before its "
            "own and behind it, with -1 or None for all"
        )
    left, right = window
    return _bound("left", left), _bound("right", right)


def _bound(name: str, value: object) -> Bound:
    if value is None or (isinstance(value, int) and value == -1):
        return None
    return read_count(f"the window's {name} bound", value, "a number of keys, or -1 or None for all of them")


def read_longest(max_seqlen_q: object, q: object) -> int:
    """Returns the number of queries of the longest varlen sequence.

    Raises:
        ProblemError: It is not a number, or exceeds the tokens of q.
    """
    longest = read_count("max_seqlen_q", max_seqlen_q, "the queries of the longest sequence")
    packed = isinstance(q, Tensor) and not q.is_nested and q.dim() == 3
    tokens = q.shape[0] if packed else 0  # type: ignore[attr-defined]
    if tokens and longest > tokens:
        raise ProblemError(
            f"max_seqlen_q is {longest} and q has {tokens} tokens: pass q as [tokens, heads, head_dim], and "
            "the queries of the longest sequence"
        )
    return longest


def read_softcap(softcap: object) -> float | None:
    """Returns the softcap. 0 means none, as in flash_attn.

    Raises:
        ProblemError: The softcap is negative or not a float32 number.
    """
    if softcap is None:
        return None
    if not isinstance(softcap, (int, float)) or not (softcap == 0 or MIN_FLOAT32 <= softcap <= MAX_FLOAT32):
        raise ProblemError(f"softcap cannot be {shown(softcap)}: pass a positive number, or None for no cap")
    return float(softcap) or None


def read_dropout(dropout: object) -> float | None:
    """Returns the fraction of dropped probabilities, None for no dropout.

    Raises:
        ProblemError: It is not a number in [0, 1).
    """
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout <= MAX_DROPOUT:
        raise ProblemError(
            f"dropout_p cannot be {shown(dropout)}: pass a number from 0 up to, and not as much as, 1"
        )
    return float(dropout) or None


def read_bias(attn_bias: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns the additive bias or the boolean mask of a call.

    Raises:
        ProblemError: Both are given, or one has the type of the other.
    """
    if attn_mask is None:
        if isinstance(attn_bias, Tensor) and attn_bias.dtype is torch.bool:
            raise ProblemError("attn_bias is torch.bool: pass it as attn_mask, where True lets a query see")
        return attn_bias
    if attn_bias is not None:
        raise ProblemError(
            "attn_bias and attn_mask are both given: pass one of them, with -inf in the bias for False"
        )
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype is not torch.bool:
        kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise ProblemError(f"attn_mask is {kind}: pass a bool tensor, or numbers to add as attn_bias")
    return attn_mask
