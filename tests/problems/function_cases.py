"""Score and mask functions of sequences with absolute positions, by name."""

import torch
from torch import Tensor

from flashtune.core.expressions.nodes import Functions
from flashtune.request.functions.tracing import trace

HEADS = 4
# Values of these are not used, but their shapes and types are.
SLOPES, DOCUMENTS, SCALES = torch.rand(HEADS), torch.arange(9), torch.rand(7)
TABLE, VISIBLE = torch.rand(HEADS, 65), torch.ones(2, 9, dtype=torch.bool)


def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return 1.5 * torch.tanh(score / 1.5)


def window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key < 20) & (query >= key)


FUNCTIONS: dict[str, Functions] = {
    name: trace(score, mask).functions
    for name, (score, mask) in {
        "alibi": (lambda s, b, h, q, k: s + 0.02 * SLOPES[h] * (k - q), None),
        "relative bias": (lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-32, 32) + 32], None),
        "window": (None, window),
        "capped window": (capped, window),
        "window by scores": (lambda s, b, h, q, k: torch.where((q - k) < 40, s, -float("inf")), None),
        "documents": (None, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
        "sequences": (lambda s, b, h, q, k: s * SCALES[b] + h, lambda b, h, q, k: (k + b) % 3 != h % 2),
        "heads and keys": (None, lambda b, h, q, k: VISIBLE[h % 2, k]),
        "nothing": (None, lambda b, h, q, k: (k >= 40) & (q < 60) & (h > 0)),
    }.items()
}
