"""A small transformer with random weights. The caller supplies the attention of its layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

# From (layer, q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim]) to the output, shaped like q.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 512


class Transformer:
    """Layers of attention and a gated perceptron. The caller supplies the attention."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        """Makes random weights, the same for the same shape."""
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            normal: Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
            return normal.to(device, dtype)

        self.shape = shape
        width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embedding = weight(shape.vocabulary, shape.hidden) * shape.hidden**0.5
        self.layers = [
            {
                "qkv": weight(width + 2 * keys, shape.hidden),
                "out": weight(shape.hidden, width),
                "up": weight(4 * shape.hidden, shape.hidden),
                "down": weight(shape.hidden, 2 * shape.hidden),
            }
            for _ in range(shape.layers)
        ]

    def __call__(self, tokens: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """Returns the logits of each token, [tokens, vocabulary] in float32.

        Args:
            tokens: [tokens].
            places: Position of each token in its sequence: [tokens].
            attend: The attention of each layer.
        """
        shape = self.shape
        hidden = self.embedding[tokens]
        split = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        for number, layer in enumerate(self.layers):
            qkv = linear(normalised(hidden), layer["qkv"])
            q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in qkv.split(split, -1))
            attended = attend(number, rotated(q, places), rotated(k, places), v.contiguous())
            hidden = hidden + linear(attended.flatten(1), layer["out"])
            gate, up = linear(normalised(hidden), layer["up"]).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, layer["down"])
        return linear(normalised(hidden), self.embedding).float()


def normalised(hidden: Tensor) -> Tensor:
    """Returns a tensor scaled to a root mean square of 1."""
    return rms_norm(hidden, hidden.shape[-1:])


def rotated(heads: Tensor, places: Tensor) -> Tensor:
    """Applies rotary positions (Su et al., 2021): [tokens, heads, head_dim]."""
    half = heads.shape[-1] // 2
    steps = torch.arange(half, device=heads.device, dtype=torch.float32)
    angle = places[:, None, None] * ROPE_BASE ** (-steps / half)
    left, right = heads.float().chunk(2, -1)
    turned = (left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos())
    return torch.cat(turned, -1).to(heads.dtype)


def integers(values: Iterable[int], device: torch.device) -> Tensor:
    """Returns numbers as an int64 tensor on a device."""
    return torch.tensor(list(values), device=device)
