"""Tile arithmetic that families share: head dims as powers of two, and SRAM of their tiles."""

from __future__ import annotations

import msgspec

# tl.dot takes no side under 16.
MIN_DOT_WIDTH = 16


class Chunk(msgspec.Struct, frozen=True):
    """Columns `start` to `start + width` of a head; `padded` where some lie beyond the head dim."""

    index: int
    start: int
    width: int
    padded: bool


def head_chunks(head_dim: int, decomposed: bool) -> tuple[Chunk, ...]:
    """A head dim as tiles whose widths are powers of two.

    Padded, 96 is one tile of 128; decomposed, it is 64 + 32, with more instructions and no waste.
    """
    if not decomposed:
        width = power_of_two(head_dim)
        return (Chunk(0, 0, width, width != head_dim),)
    chunks: list[Chunk] = []
    start = 0
    while start < head_dim:
        left = head_dim - start
        width = max(MIN_DOT_WIDTH, 1 << (left.bit_length() - 1))
        chunks.append(Chunk(len(chunks), start, width, width > left))
        start += width
    return tuple(chunks)


def power_of_two(size: int) -> int:
    """The least power of two that holds `size`, and at least what tl.dot takes."""
    return max(MIN_DOT_WIDTH, 1 << (size - 1).bit_length())


def is_exact(head_dim: int) -> bool:
    """Whether a head dim needs no padding."""
    return power_of_two(head_dim) == head_dim


def columns(chunks: tuple[Chunk, ...]) -> int:
    """Columns of all chunks together, padding included."""
    return sum(chunk.width for chunk in chunks)
