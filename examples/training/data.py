"""Random data that can be learned: each sequence is in one of a few languages."""

import math

import torch
from torch import Tensor

# Words that occur, and how many languages there are. A language says which word follows which.
WORDS = 256
LANGUAGES = 4
# Share of words that follow nothing, drawn from those that the sequence's language is fond of. These tell
# what language it is: a model that does not attend has to guess which of `LANGUAGES` words comes next.
NOISE = 0.1


def sequences(count: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Returns sequences of tokens, int64 [count, length] on the CPU, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    words = min(WORDS, vocabulary)
    follows = torch.randint(words, (LANGUAGES, words), generator=generator)
    language = torch.randint(LANGUAGES, (count,), generator=generator)
    fond = torch.randint(words // LANGUAGES, (length, count), generator=generator) * LANGUAGES + language
    keeps = torch.rand(length, count, generator=generator) >= NOISE
    tokens = fond
    for position in range(1, length):
        tokens[position] = torch.where(
            keeps[position], follows[language, tokens[position - 1]], fond[position]
        )
    return tokens.T.contiguous()


def floor(vocabulary: int) -> float:
    """Returns the approximate entropy of the data, in nats per token. It is the lowest possible loss."""
    kinds = min(WORDS, vocabulary) // LANGUAGES
    return -((1 - NOISE) * math.log(1 - NOISE) + NOISE * math.log(NOISE / kinds))
