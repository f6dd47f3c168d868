"""Dropout of attention probabilities: the seed of a call, and the probabilities that a seed keeps.

The seed, the row and the key alone determine whether a probability is dropped. So both passes agree for any
tile size, and nothing is stored. The generator is counter-based (Salmon et al., 2011). Kernels compute it in
32-bit words (`templates/common/dropout.jinja`). This module computes it with tensors of 64-bit integers, for
verification and tests.
"""

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 2**32
LOW = WORD - 1
# From lowbias32 (Wellons, 2018): shifts and multipliers of a permutation with full bit diffusion.
SCRAMBLE = ((16, 0x7FEB352D), (15, 0x846CA68B))
# From the golden ratio: the step of a Weyl sequence over keys. It also makes the two words of a row differ.
STEP = 0x9E3779B9
# Multipliers of triple32 (Wellons, 2018): for the wide product, and for the last one.
FOLD, SPREAD = 0xED5AD4BB, 0xAC4C1B51


class RowStates(NamedTuple):
    """Two words of random state for each row, in int64."""

    first: Tensor
    second: Tensor


def draw_seed(device: torch.device) -> Tensor:
    """Returns a seed from torch's default generator of a device, int64 [1]."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def threshold(dropout: float) -> int:
    """Returns the threshold: smaller words are dropped. It uses the float32 fraction that kernels get."""
    return int(torch.tensor(dropout, dtype=torch.float32).double().item() * WORD)


def kept_weights(
    seed: Tensor,
    heads: Tensor,
    queries: Tensor,
    keys: int,
    dropout: float,
    device: torch.device | None = None,
) -> Tensor:
    """Returns which probabilities are kept, for a tile of rows of each head.

    Args:
        seed: Int64 [1].
        heads: Numbers of heads, batch · heads of a sequence + head: int64 [heads]. The states of rows are
            computed on their device.
        queries: The rows of the tile: int64 [rows], or [heads, rows].
        keys: The number of keys, from key 0 on.
        dropout: The fraction that is dropped.
        device: The device of the result; by default that of `heads`.

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
    """Returns the states of rows for heads and queries of broadcastable shapes."""
    low, high = _low(seed), _high(seed)
    states = (_scrambled(_scrambled(_scrambled(low ^ other) ^ high) ^ heads) for other in (0, STEP))
    return RowStates(*(_scrambled(state ^ queries) for state in states))


def _scrambled(words: Tensor) -> Tensor:
    for shift, factor in SCRAMBLE:
        words = words ^ (words >> shift)
        # Products wrap at 64 bits, and their lower halves are correct.
        words = _low(words * factor)
    return words ^ (words >> 16)


def _low(words: Tensor) -> Tensor:
    return words & LOW


def _high(words: Tensor) -> Tensor:
    return (words >> 32) & LOW
