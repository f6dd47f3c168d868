"""What appending and attention read of a ledger, as tensors: slots, block tables and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashtune.arguments import shown
from flashtune.errors import UsageError
from flashtune.paging import Ledger
from flashtune.tensor_checks import require_dense

Integers = NDArray[np.signedinteger[Any]]


def listed(sequences: int | Sequence[int], tokens: int | Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns sequences and a count of tokens for each, where either may be one number.

    Raises:
        UsageError: They are neither numbers nor lists.
    """
    numbers = [sequences] if isinstance(sequences, int) else numbers_of("sequences", sequences)
    return numbers, [tokens] * len(numbers) if isinstance(tokens, int) else numbers_of("tokens", tokens)


def numbers_of(name: str, value: Sequence[int]) -> list[int]:
    """Returns a list of numbers, which are not looked at.

    Raises:
        UsageError: It is no sequence.
    """
    try:
        return list(value)
    except TypeError:
        raise UsageError(f"{name} cannot be {shown(value)}: pass a list of numbers") from None


def slots_of(ledger: Ledger, sequences: Sequence[int], tokens: Sequence[int]) -> Integers:
    """Slots of the last tokens of sequences, int64 [all tokens]."""
    runs = [run for pair in zip(sequences, tokens, strict=True) for run in ledger.runs(*pair)]
    first, rows = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    before = rows.cumsum() - rows
    return np.repeat(first - before, rows) + np.arange(rows.sum())


def table_of(ledger: Ledger, sequences: Sequence[int]) -> Integers:
    """Pages of sequences, int32 [batch, pages of the longest, and 1 at least]; 0 behind the last."""
    pages = [ledger.holding(one).pages for one in numbers_of("sequences", sequences)]
    table = np.zeros((len(pages), max([1, *map(len, pages)])), dtype=np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def lengths_of(ledger: Ledger, sequences: Sequence[int]) -> Integers:
    """Tokens of sequences, int32 [batch]."""
    lengths = [ledger.holding(one).length for one in numbers_of("sequences", sequences)]
    return np.array(lengths, dtype=np.int32)


def check_out(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks that a tensor has room for what is to be filled in.

    Raises:
        UsageError: It has not, or is of another kind.
    """
    if out is None:
        return
    require_dense("out", out)
    if out.dtype is not dtype or out.device != device or out.dim() != len(shape):
        raise UsageError(
            f"out is {out.dtype} of {out.dim()} dimensions on {out.device}: "
            f"pass {dtype} of {len(shape)} on {device}"
        )
    if any(size < needed for size, needed in zip(out.shape, shape, strict=True)):
        raise UsageError(f"out of shape {list(out.shape)} is too small: {list(shape)} are needed")


def delivered(array: Integers, device: torch.device, out: Tensor | None, rest: int) -> Tensor:
    """An array on a device, in the first elements of `out` where there is one; its others become `rest`.

    Raises:
        UsageError: `out` does not fit.
    """
    host = torch.from_numpy(array)
    check_out(out, array.shape, host.dtype, device)
    # From pinned memory, which torch keeps until it was read, the host need not wait for the copy.
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
    if out is None:
        return there
    out.fill_(rest)
    out[tuple(slice(size) for size in array.shape)] = there
    return out
