"""Mutants of the portable serving families, put together."""

from __future__ import annotations

from tests.mutants.core import Mutant
from tests.mutants.portable import (
    block_lists,
    decode_caches,
    decode_scores,
    decode_splits,
    masked_borders,
    masked_places,
    masked_scores,
)
from tests.mutants.serving_size import Size


def serving_mutants(size: Size) -> tuple[Mutant, ...]:
    """Those that change results anywhere, at a size."""
    return (
        *masked_borders.borders(size),
        *block_lists.lists(size),
        *masked_scores.scores(size),
        *masked_places.places(size),
        *decode_splits.parts(size),
        *decode_scores.rows(size),
        *decode_caches.caches(size),
    )


def serving_mutants_of_a_gpu(size: Size) -> tuple[Mutant, ...]:
    """Those of instructions that only a GPU has, of a race, and of long lists."""
    return (*decode_scores.bytes_of(size), *decode_scores.early(size), *block_lists.long_lists(size))
