"""A decoder of GPT-2's structure (Radford et al., 2019). The caller supplies the attention."""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from torch.utils.checkpoint import checkpoint

# Of q, k, v and the share of weights to drop: causal attention; all are [batch, seqlen, heads, head_dim].
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

DEVIATION = 0.02


class Shape(msgspec.Struct, frozen=True):
    """Sizes of the model; by default GPT-2's, with 124 million parameters."""

    layers: int = 12  # Blocks of attention and a perceptron.
    heads: int = 12  # Heads of attention.
    width: int = 768  # Columns of the hidden state.
    context: int = 1024  # Tokens of a sequence.
    vocabulary: int = 50_304  # Number of tokens, padded to a multiple of 64.
    # Probability of dropout, of attention weights and of the outputs of blocks.
    dropout: float = 0.0


TINY = Shape(layers=2, heads=2, width=32, context=32, vocabulary=64)


class Block(nn.Module):
    """Attention and a perceptron, each with a normalisation before it and a residual connection."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        """Weights of one layer, not initialised yet."""
        super().__init__()
        self.heads, self.dropout, self.attend = shape.heads, shape.dropout, attend
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden state behind this layer: [batch, seqlen, width]."""
        # Views of one tensor: nothing is copied, and gradients are written into views alike.
        q, k, v = self.qkv(self.before_attention(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = self.attend(q, k, v, self.dropout if self.training else 0.0)
        hidden = hidden + self.drop(self.out(attended.flatten(2)))
        inner = gelu(self.up(self.before_mlp(hidden)), approximate="tanh")
        added: Tensor = hidden + self.drop(self.down(inner))
        return added


class Decoder(nn.Module):
    """Embeddings, blocks and the logits of the next token."""

    def __init__(self, shape: Shape, attend: Attend, *, checkpointing: bool = False) -> None:
        """Random weights of torch's default generator.

        Args:
            shape: Sizes.
            attend: How each layer attends.
            checkpointing: Whether the backward pass computes each block again in place of keeping what is
                inside of it.
        """
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.last_norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=DEVIATION / (2 * shape.layers) ** 0.5 if added else DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token behind each one: [batch, seqlen, vocabulary].

        Args:
            tokens: Int64 [batch, seqlen].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.drop(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointing else block(hidden)
        return linear(self.last_norm(hidden), self.tokens.weight)
