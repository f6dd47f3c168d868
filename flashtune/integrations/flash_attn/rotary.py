"""Rotary position embedding (Su et al., 2021), as flash_attn's kernels apply it."""

import torch
from torch import Tensor

from flashtune.integrations.flash_attn.token_rows import sequence_numbers


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Returns the tensor with its first columns rotated. It computes in float32 or wider.

    Args:
        x: [..., heads, width].
        cos: Cosines, [positions, rotated columns / 2].
        sin: Sines, likewise.
        positions: Row of `cos` for each token: integers of a shape that broadcasts to x's, without the last
            two dimensions. Positions after the last row rotate by 0.
        interleaved: Whether neighbouring columns are rotated together. Otherwise those of both halves are.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if x.element_size() > 1 else torch.float32
    rows = positions.long().clamp(0, cos.shape[0] - 1)
    inside = (positions < cos.shape[0])[..., None, None]
    cosines = torch.where(inside, cos.to(wide)[rows][..., None, :], 1.0)
    sines = torch.where(inside, sin.to(wide)[rows][..., None, :], 0.0)
    columns = 2 * cos.shape[-1]
    part = x[..., :columns].to(wide)
    if interleaved:
        first, second = part.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = part.chunk(2, -1)
    pair = first * cosines - second * sines, first * sines + second * cosines
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = turned.to(x.dtype)
    if columns == x.shape[-1]:
        return turned
    if x.element_size() == 1:
        rest = [turned.view(torch.uint8), x[..., columns:].contiguous().view(torch.uint8)]
        return torch.cat(rest, -1).view(x.dtype)
    return torch.cat([turned, x[..., columns:]], -1)


def token_positions(offsets: Tensor, tokens: int, starts: Tensor | None) -> Tensor:
    """Returns the positions of tokens: [batch, tokens], or [tokens] of packed ones.

    `offsets` is the position of the first token of each sequence, [batch].
    """
    places = torch.arange(tokens, device=offsets.device)
    if starts is None:
        return offsets.long()[:, None] + places
    return (offsets - starts[:-1]).long()[sequence_numbers(starts, tokens)] + places


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Returns a tensor with rotary position embedding. It is differentiable.

    Args:
        x: [batch, tokens, heads, width]; packed [tokens, heads, width] with `cu_seqlens`.
        cos: Cosines, [positions, rotated columns / 2].
        sin: Sines, likewise.
        interleaved: Whether neighbouring columns are rotated together. Otherwise those of both halves are.
        inplace: Whether to write the result to `x` too.
        seqlen_offsets: Position of the first token, for all sequences or for each one.
        cu_seqlens: Offsets of packed sequences, int32 [batch + 1].
        max_seqlen: Without effect.
    """
    del max_seqlen
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if not isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = torch.full((batch,), seqlen_offsets, device=x.device)
    tokens = x.shape[1] if cu_seqlens is None else x.shape[0]
    positions = token_positions(seqlen_offsets, tokens, cu_seqlens)
    out = rotated(x, cos, sin, positions, interleaved)
    return x.copy_(out) if inplace else out
