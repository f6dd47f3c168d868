"""Dropout of attention weights: the seed of a call, and which weights a seed keeps.

A weight stays or falls by its seed, its row and its key alone, so that both passes agree without storing
anything, whatever their tiles are. The generator is counter-based (Salmon et al., 2011). What kernels do in
32-bit words (`templates/common/dropout.jinja`) is done here on tensors of 64-bit integers, for proofs and
tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 2**32
LOW = WORD - 1
# Of lowbias32 (Wellons, 2018): shifts and multipliers of a permutation of which each bit hangs on all.
SCRAMBLE = ((16, 0x7FEB352D), (15, 0x846CA68B))
# The golden ratio's: keys count along a Weyl sequence of it, and it keeps the two words of a row apart.
STEP = 0x9E3779B9
# Multipliers of triple32 (Wellons, 2018): of the wide product whose halves are joined, and of the last one.
FOLD, SPREAD = 0xED5AD4BB, 0xAC4C1B51


class RowStates(NamedTuple):
    """Two words of random state for each row, in int64."""

    first: Tensor
    second: Tensor


def draw_seed(device: torch.device) -> Tensor:
    """A seed of torch's default generator for a device, int64 [1]: a generator's state decides it."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def threshold(dropout: float) -> int:
    """Words under this one fall: a share in float32, as kernels are given it, of all words."""
    return int(torch.tensor(dropout, dtype=torch.float32).double().item() * WORD)


def kept_weights(
    seed: Tensor,
    heads: Tensor,
    queries: Tensor,
    keys: int,
    dropout: float,
    device: torch.device | None = None,
) -> Tensor:
    """Which weights stay, of a tile of rows for each head.

    Args:
        seed: Int64 [1].
        heads: Numbers of heads, batch · heads of a sequence + head: int64 [heads]. States of rows are worked
            out where these are.
        queries: Their rows: int64 [rows], or [heads, rows].
        keys: The first so many keys are asked for.
        dropout: The share that falls.
        device: Where the result is wanted; None where the heads' numbers are.

    Returns:
        Boolean [heads, rows, keys].
    """
    states = row_states(seed.to(heads.device), heads[:, None], queries)
    device = heads.device if device is None else device
    first, second = (state[..., None].to(device) for state in states)
    words = first + _low(torch.arange(keys, device=device) * STEP)
    product = _low(words) * FOLD
    words = _high(product) ^ _low(product) ^ second
    stay: Tensor = _low(words * SPREAD) >= threshold(dropout)
    return stay


def row_states(seed: Tensor, heads: Tensor, queries: Tensor) -> RowStates:
    """The state of rows: of heads and queries of shapes that fit together."""
    low, high = _low(seed), _high(seed)
    states = (_scrambled(_scrambled(_scrambled(low ^ other) ^ high) ^ heads) for other in (0, STEP))
    return RowStates(*(_scrambled(state ^ queries) for state in states))


def _scrambled(words: Tensor) -> Tensor:
    for shift, factor in SCRAMBLE:
        words = words ^ (words >> shift)
        # Products wrap at 64 bits, of which the lower half is right.
        words = _low(words * factor)
    return words ^ (words >> 16)


def _low(words: Tensor) -> Tensor:
    return words & LOW


def _high(words: Tensor) -> Tensor:
    return (words >> 32) & LOW
