"""Attention with flash_attn's semantics by loops over sequences, heads and queries, in float64."""

import math
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


def visible(rule: Rule, position: int, keys: int) -> list[int]:
    """Returns the keys that a query at a position among the keys sees."""
    seen = []
    for key in range(keys):
        is_seen = not (rule.causal and key > position)
        is_seen &= rule.left is None or key >= position - rule.left
        is_seen &= rule.causal or rule.right is None or key <= position + rule.right
        is_seen &= not rule.chunk or key // rule.chunk == position // rule.chunk
        if is_seen:
            seen.append(key)
    return seen


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
    group = heads // k.shape[1]
    scale = 1 / math.sqrt(width) if rule.scale is None else rule.scale
    rows, sums = [], []
    for head in range(heads):
        own_k, own_v = k[:, head // group].double(), v[:, head // group].double()
        for query in range(queries):
            position = query + k.shape[0] - queries
            seen = visible(rule, position, k.shape[0])
            scores = own_k[seen] @ q[query, head].double() * scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.slopes is not None:
                distance = torch.tensor([abs(position - key) for key in seen], dtype=torch.float64)
                scores = scores - rule.slopes[head].double() * distance
            logits = (
                scores if rule.sinks is None else torch.cat([scores, rule.sinks[head : head + 1].double()])
            )
            if not logits.numel():
                rows.append(q[query, head, :0].sum() + own_v.new_zeros(v.shape[-1]))
                sums.append(torch.tensor(-torch.inf, dtype=torch.float64))
                continue
            lse = torch.logsumexp(logits, 0)
            weights = torch.exp(scores - lse)
            if kept is not None:
                weights = weights * kept[head, query, seen] / (1 - dropout)
            rows.append(weights @ own_v[seen])
            sums.append(lse)
    out = (
        torch.stack(rows).view(heads, queries, -1).transpose(0, 1)
        if rows
        else q.new_zeros(0, heads, v.shape[-1])
    )
    return out, torch.stack(sums).view(heads, queries) if sums else torch.zeros(heads, 0, dtype=torch.float64)


def batch_of(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the results of sequences [batch, tokens, heads, width]. Slopes are [batch, heads]."""
    results = []
    for b in range(q.shape[0]):
        count = k.shape[1] if lengths is None else lengths[b]
        own = rule if rule.slopes is None else rule._replace(slopes=rule.slopes[b])
        results.append(one_sequence(q[b], k[b, :count], v[b, :count], own))
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
