"""Rows of tokens of sequences that are packed, padded or not fully used, moved on the device.

Nothing here reads a length on the host. All functions are differentiable.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Where the tokens of sequences are."""

    # Offsets of packed sequences and the end of the last one, int32 [batch + 1]. None if the tensor has a
    # dimension of sequences.
    starts: Tensor | None = None
    longest: int = 0  # Number of tokens of the longest sequence, or more. 0 without `starts`.
    used: Tensor | None = None  # Number of tokens that count, int32 [batch]; None for all.
    # Number of first tokens of each sequence that do not count, int32 [batch]; None for none. They are part
    # of `used`.
    skipped: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all tokens count."""
        return self.used is None and self.skipped is None


# All tokens of a tensor with a dimension of sequences.
WHOLE = Sequences()


class Packed(NamedTuple):
    """Tokens that count, packed."""

    # Offsets of the packed sequences and the end of the last one, int32 [batch + 1].
    starts: Tensor
    longest: int  # Number of tokens of the longest sequence, or more.
    # The row of each packed token among the rows of all sequences, int64 [rows]; None if all rows are tokens
    # that count. Rows after the last token repeat another one.
    source: Tensor | None = None
    # For each row of all sequences its packed token, int64 [rows]; None if `source` is.
    back: Tensor | None = None
    counts: Tensor | None = None  # Whether a row counts, bool [rows]; None if `source` is.


def sequence_numbers(starts: Tensor, rows: int) -> Tensor:
    """Returns the sequence of each row, int64 [rows]. Rows after the last sequence belong to that one."""
    places = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    numbers = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    return numbers.clamp_(max=max(starts.numel() - 2, 0))


def as_lengths(starts: Tensor) -> Tensor:
    """Returns the lengths of packed sequences, int32 [batch]."""
    return (starts[1:] - starts[:-1]).to(torch.int32)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Returns rows of a tensor. torch cannot index 8-bit floats, so their bytes are taken."""
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)


def flat(tensor: Tensor, sequences: Sequences) -> Tensor:
    """Returns the rows of all sequences, [rows, heads, width]."""
    return tensor if sequences.starts is not None else tensor.flatten(0, 1)


def regions(sequences: Sequences, batch: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the first row of each sequence and the number of its tokens that count, int64 [batch] each.

    `capacity` is the size of the dimension of tokens, if the tensor has a dimension of sequences.
    """
    if sequences.starts is None:
        first = torch.arange(batch, device=device) * capacity
        lengths = torch.full((batch,), capacity, device=device)
    else:
        first = sequences.starts[:-1].long()
        lengths = as_lengths(sequences.starts).long()
    if sequences.used is not None:
        lengths = sequences.used.long()
    if sequences.skipped is not None:
        skipped = sequences.skipped.long()
        return first + skipped, (lengths - skipped).clamp_(min=0)
    return first, lengths


def packing(tensor: Tensor, sequences: Sequences) -> Packed:
    """Returns how to pack the tokens of a tensor that count."""
    starts = sequences.starts
    if starts is not None and sequences.is_whole:
        return Packed(starts, sequences.longest)
    batch = tensor.shape[0] if starts is None else starts.numel() - 1
    capacity = tensor.shape[1] if starts is None else sequences.longest
    rows = batch * capacity if starts is None else tensor.shape[0]
    device = tensor.device
    if sequences.is_whole:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * capacity
        return Packed(ends, capacity)
    first, lengths = regions(sequences, batch, capacity, device)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(rows, device=device)
    number = sequence_numbers(ends, rows)
    index = (first[number] + places - ends[number]).clamp_(0, max(rows - 1, 0))
    owner = (torch.searchsorted(first, places, right=True) - 1).clamp_(min=0)
    offset = places - first[owner]
    counts = (offset >= 0) & (offset < lengths[owner])
    back = (ends[owner] + offset).clamp_(0, max(rows - 1, 0))
    return Packed(ends.to(torch.int32), capacity, index, back, counts)


def packed_rows(tensor: Tensor, sequences: Sequences, how: Packed) -> Tensor:
    """Returns the packed tokens, [rows, heads, width]."""
    rows = flat(tensor, sequences)
    return rows if how.source is None else take(rows, how.source)


def unpacked_rows(rows: Tensor, how: Packed, fill: float) -> Tensor:
    """Returns packed results [rows, ...] at the rows of their tokens, and `fill` at all others."""
    if how.back is None or how.counts is None:
        return rows
    counts = how.counts.view(-1, *[1] * (rows.dim() - 1))
    return rows.index_select(0, how.back).masked_fill(~counts, fill)


def padded(tensor: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Returns sequences with padding, and the number of tokens of each.

    Returns:
        [batch, longest, heads, width], with any finite rows as padding, and int64 [batch].
    """
    starts = sequences.starts
    batch = tensor.shape[0] if starts is None else starts.numel() - 1
    longest = tensor.shape[1] if starts is None else sequences.longest
    first, lengths = regions(sequences, batch, longest, tensor.device)
    if starts is None and sequences.skipped is None:
        return tensor, lengths
    rows = flat(tensor, sequences)
    index = first[:, None] + torch.arange(longest, device=tensor.device)
    index = index.clamp_(0, max(rows.shape[0] - 1, 0)).flatten()
    if not rows.shape[0]:
        return rows.new_zeros(batch, longest, *rows.shape[1:]), lengths
    return take(rows, index).unflatten(0, (batch, longest)), lengths


def unpadded_rows(results: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Returns results [batch, longest, ...] of packed tokens, [rows, ...]."""
    number = sequence_numbers(starts, rows)
    places = torch.arange(rows, device=starts.device) - starts[number]
    index = number * results.shape[1] + places.clamp(0, max(results.shape[1] - 1, 0))
    return results.flatten(0, 1).index_select(0, index)
