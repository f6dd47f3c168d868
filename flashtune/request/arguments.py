"""Checks of single arguments of a call, and their conversion. All errors are of type `ProblemError`."""

import enum
from typing import TypeVar

import torch
from torch import Tensor

from flashtune.core.arguments import read_count, shown
from flashtune.core.block_mask import BlockMask
from flashtune.core.errors import ProblemError
from flashtune.core.features.description import NumberInput
from flashtune.core.problem import MASK_BLOCKS, Causal

Bound = int | None
Window = tuple[Bound, Bound]

NO_WINDOW: Window = (None, None)

Option = TypeVar("Option", bound=enum.StrEnum)

CAUSALS = tuple(Causal)


def read_causal(causal: object) -> str:
    """Returns the value of `Causal`. `True` means bottom-right, as in flash_attn."""
    if causal is True:
        return "bottom_right"
    if causal is False:
        return "none"
    if isinstance(causal, str) and causal in CAUSALS:
        return causal
    raise ProblemError(f"causal cannot be {shown(causal)}: pass False, True, 'top_left' or 'bottom_right'")


def read_option(name: str, value: object, values: tuple[Option, ...]) -> Option:
    """Returns the known value of an option."""
    for choice in values:
        if isinstance(value, str) and value == choice:
            return choice
    choices = " or ".join(repr(choice.value) for choice in values)
    raise ProblemError(f"{name} cannot be {shown(value)}: pass {choices}")


def read_window(window: object) -> Window:
    """Returns both bounds of a window; None means unbounded."""
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
    """Returns the number of queries of the longest varlen sequence."""
    longest = read_count("max_seqlen_q", max_seqlen_q, "the queries of the longest sequence")
    packed = isinstance(q, Tensor) and not q.is_nested and q.dim() == 3
    tokens = q.shape[0] if packed else 0  # type: ignore[attr-defined]
    if tokens and longest > tokens:
        raise ProblemError(
            f"max_seqlen_q is {longest} and q has {tokens} tokens: pass q as [tokens, heads, head_dim], and "
            "the queries of the longest sequence"
        )
    return longest


def read_number(number: NumberInput, value: object) -> float | None:
    """Returns a number of a feature, or None if it is 0 or None."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and (value == 0 or number.least <= value <= number.most):
        return float(value) or None
    raise ProblemError(f"{number.option} cannot be {shown(value)}: pass {number.remedy}")


def read_block_mask(mask: object) -> BlockMask:
    """Returns the block mask of a call."""
    if not isinstance(mask, BlockMask):
        raise ProblemError(
            f"block_mask cannot be {shown(mask)}: pass a flashtune.BlockMask, for example "
            "BlockMask.from_blocks(visible)"
        )
    if mask.block_size not in MASK_BLOCKS:
        sizes = " or ".join(map(str, MASK_BLOCKS))
        raise ProblemError(f"block_mask.block_size cannot be {shown(mask.block_size)}: pass {sizes}")
    return mask


def read_bias(attn_bias: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns the additive bias or the boolean mask of a call."""
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
