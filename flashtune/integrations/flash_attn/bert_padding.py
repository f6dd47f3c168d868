"""`flash_attn.bert_padding`: packs padded sequences and pads packed ones. It reads lengths on the host."""

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - flash_attn's name
    """Returns rows of a tensor, [indices, ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns a tensor of `first_axis_dim` rows with the values at `indices` and zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(
    input: Tensor,  # noqa: A002 - flash_attn's name
    indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns rows of a tensor, and the tensor without gradients."""
    return index_first_axis(input, indices), input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Returns the tokens of padded sequences, packed.

    Args:
        hidden_states: [batch, tokens, ...].
        attention_mask: Whether a token counts, bool or integers [batch, tokens].
        unused_mask: Whether a token is kept although it does not count, likewise.

    Returns:
        The tokens [rows, ...], their places in the flattened tokens int64 [rows], the offsets of sequences
        int32 [batch + 1], the number of tokens of the longest, and the numbers of tokens that count, int32
        [batch].
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    places = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), places)
    return rows, places, _offsets(lengths), longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns the tokens of rows with several sequences, packed.

    Args:
        hidden_states: [batch, tokens, ...]. A row starts with its sequences, one after the other.
        attention_mask_in_length: Lengths of the sequences of a row, then zeros: integers [batch, tokens].

    Returns:
        The tokens [rows, ...], their places in the flattened tokens int64 [rows], the offsets of sequences
        int32 [sequences + 1], and the number of tokens of the longest.
    """
    total = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[1], device=total.device) < total
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    places = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), places)
    return rows, places, _offsets(lengths), longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns packed tokens as padded sequences [batch, seqlen, ...], with zeros as padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(
        batch, seqlen, *hidden_states.shape[1:]
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
