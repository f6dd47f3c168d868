"""Attention with flash_attn's semantics, one sequence after another, in float64."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """The options of the reference, as in flash_attn. A bound of None means no bound, and may be negative."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    chunk: int = 0
    scale: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


def visible(rule: Rule, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Returns which keys each query sees, and the distance of both, [queries, keys]."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if rule.causal:
        seen &= key <= position
    elif rule.right is not None:
        seen &= key <= position + rule.right
    if rule.left is not None:
        seen &= key >= position - rule.left
    if rule.chunk:
        seen &= key // rule.chunk == position.div(rule.chunk, rounding_mode="floor")
    return seen, (position - key).abs()


def one_sequence(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, kept: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the output [queries, heads, width] and the log-sum-exp [heads, queries] of one sequence.

    Args:
        q: Queries, [queries, heads, width].
        k: Keys, [keys, kv_heads, width].
        v: Values, [keys, kv_heads, width].
        rule: The options. Slopes are [heads].
        kept: Whether dropout keeps a weight, [heads, queries, keys].
        dropout: Fraction of dropped weights.
    """
    queries, heads, width = q.shape
    k, v = (tensor.double().repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (width**-0.5 if rule.scale is None else rule.scale)
    seen, distance = visible(rule, queries, k.shape[0])
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.slopes is not None:
        scores = scores - rule.slopes[:, None, None].double() * distance
    logits = scores.masked_fill(~seen, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.double()[:, None, None].expand(heads, queries, 1)
        logits = torch.cat([logits, sinks], -1)
    # Rows without keys have zeros, and no NaN in gradients.
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)[..., : k.shape[0]]
    if kept is not None:
        weights = weights * kept / (1 - dropout)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(logits, -1)


def batch_of(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Returns the results of sequences [batch, tokens, heads, width]. Slopes are [batch, heads]."""
    results = []
    for b in range(q.shape[0]):
        own = rule if rule.slopes is None else rule._replace(slopes=rule.slopes[b])
        results.append(one_sequence(q[b], k[b], v[b], own))
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def rotated_by_pairs(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """Returns one token [heads, width] rotated pair by pair in float64."""
    half = cos.shape[-1]
    out = x.double().clone()
    for column in range(half):
        a, b = (2 * column, 2 * column + 1) if interleaved else (column, column + half)
        c, s = cos[position, column].double(), sin[position, column].double()
        out[:, a] = x[:, a].double() * c - x[:, b].double() * s
        out[:, b] = x[:, a].double() * s + x[:, b].double() * c
    return out
