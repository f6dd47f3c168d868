"""The matrix `S_dmask` of flash_attn 2: which weights dropout kept, and the weights before normalization.

An element is exp(score - largest score), negative if it was dropped. The largest score is that of the
element's block of keys and of all blocks after it, because flash_attn's kernels visit the last block first.
Both dimensions are padded to multiples of 128. It is for tests: it takes memory for all scores.
"""

import math

import torch
from torch import Tensor

from flashtune.integrations.flash_attn.features import Features
from flashtune.integrations.flash_attn.token_rows import Sequences, padded
from flashtune.request.dropout import kept_weights

PADDING = 128


def block_of_keys(head_dim: int, is_dropout: bool, is_causal: bool, capability: tuple[int, int]) -> int:
    """Returns the number of keys that flash_attn's kernel visits at a time."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if 96 < head_dim <= 128 and (is_dropout or (capability[0] == 8 and capability[1] > 0 and not is_causal)):
        return 32
    return 64


def capability_of(device: torch.device | str) -> tuple[int, int]:
    """Returns the compute capability of a GPU; that of an H200 without a GPU."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def dropout_pattern(q: Tensor, k: Tensor, queries: Sequences, keys: Sequences, features: Features) -> Tensor:
    """Returns `S_dmask` in q's type, [batch, heads, queries, keys] of the longest sequence.

    Queries and keys are rounded up to a multiple of 128. Hidden keys and padding have zeros.
    """
    assert features.seed is not None
    with torch.no_grad():
        wide_q, lengths_q = padded(q, queries)
        wide_k, lengths_k = padded(k, keys)
        batch, rows, heads = wide_q.shape[:3]
        size = batch, heads, _rounded(rows), _rounded(wide_k.shape[1])
        pattern = q.new_zeros(size)
        scale = 1 / math.sqrt(q.shape[-1]) if features.scale is None else features.scale
        block = block_of_keys(q.shape[-1], True, features.causal, capability_of(q.device))
        for b in range(batch):
            scores = _scores(wide_q[b], wide_k[b], lengths_q[b], lengths_k[b], scale, features, b)
            weights = torch.exp(scores - _largest(scores, block))
            row = torch.arange(rows, device=q.device)
            number = torch.arange(heads, device=q.device)
            if queries.starts is None:
                number = number + b * heads
            else:
                row = row + queries.starts[b]
            kept = kept_weights(features.seed, number, row, scores.shape[-1], features.dropout)
            pattern[b, :, :rows, : scores.shape[-1]] = torch.where(kept, weights, -weights)
        return pattern


def _scores(
    q: Tensor, k: Tensor, count_q: Tensor, count_k: Tensor, scale: float, features: Features, sequence: int
) -> Tensor:
    """Returns the scores of one sequence, float32 [heads, queries, keys], with -inf where they are hidden."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group, 1).float()) * scale
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    position = torch.arange(q.shape[0], device=q.device)[:, None] + (count_k - count_q)
    key = torch.arange(k.shape[0], device=q.device)
    slopes = features.alibi_slopes
    if slopes is not None:
        own = slopes if slopes.dim() == 1 else slopes[sequence]
        scores = scores - own[:, None, None] * (position - key).abs()
    hidden = key >= count_k
    if features.left is not None:
        hidden = hidden | (key < position - features.left)
    right = 0 if features.causal else features.right
    if right is not None:
        hidden = hidden | (key > position + right)
    return scores.masked_fill(hidden, -torch.inf)


def _largest(scores: Tensor, block: int) -> Tensor:
    """Returns for each key the largest score of its block and all later ones; 0 for rows without scores."""
    keys = scores.shape[-1]
    filled = torch.nn.functional.pad(scores, (0, -keys % block), value=-torch.inf)
    blocks = filled.unflatten(-1, (-1, block)).amax(-1)
    largest = blocks.flip(-1).cummax(-1).values.flip(-1)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    spread: Tensor = largest.repeat_interleave(block, -1)
    return spread[..., :keys]


def _rounded(tokens: int) -> int:
    return -(-tokens // PADDING) * PADDING
