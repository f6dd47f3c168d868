"""The lengths of a check's problems, and their probes.

Lengths are chosen around multiples of both sides of the tile, up to more blocks than the pipeline has stages.
Errors of tail masks, prologues and epilogues occur only at these borders.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from flashtune.core.problem import Causal, Problem
from flashtune.verification.probes import Probe

# Most blocks of keys of a problem, also for deeper pipelines.
MAX_BLOCKS = 6
LONGEST = 1536
SMALL_REPEATS = 3
# Heads, KV heads and batch that give more tiles, at three per head, than a GPU has SMs (108 to 148). 195
# tiles take two waves and 315 take three, with an incomplete last wave.
ROUNDS = ((13, 1, 5), (15, 5, 7))


class Tile(NamedTuple):
    """Queries and keys of a tile, and the number of blocks of keys in flight."""

    queries: int
    keys: int
    depth: int


class Shape(msgspec.Struct, frozen=True):
    """A probe at a pair of lengths."""

    probe: Probe
    seqlen_q: int
    seqlen_kv: int
    repeats: int = 1


def shapes_of(tile: Tile, problem: Problem, *, quick: bool) -> Iterator[Shape]:
    """Yields the small problems of a check in a fixed order."""
    return (_quick if quick else _full)(tile, problem)


def _quick(tile: Tile, problem: Problem) -> Iterator[Shape]:
    m, n, depth = tile
    long = (depth + 1) * n + n // 2 + 1
    side = max(m, n) + 1
    yield Shape(Probe.RANDOM, m + 1, 2 * n - 1, SMALL_REPEATS)
    yield Shape(Probe.RANDOM, 1, n + 1)
    yield Shape(Probe.RANDOM, side, side)
    yield Shape(Probe.RANDOM, 2 * m + 3, n - 1)
    yield Shape(Probe.FAR_BELOW, m - 1, n + 1)
    yield Shape(Probe.FAR_BELOW, m + 1, n - 1)
    yield Shape(Probe.FAR_BELOW, m, long)
    yield Shape(Probe.NEEDLE, m + 1, long)
    yield Shape(Probe.LAST, m, 2 * n)
    yield Shape(Probe.RISING, m - 1, 2 * n + 1)
    yield Shape(Probe.STEEP, 2 * m, long)
    if problem.dtype.is_quantized:
        yield Shape(Probe.FAINT, m + 1, long)
    if problem.causal is not Causal.NONE:
        yield Shape(Probe.DIAGONAL, 2 * side, 2 * side)
        yield Shape(Probe.DIAGONAL, m + 1, long)


def _full(tile: Tile, problem: Problem) -> Iterator[Shape]:
    m, n, depth = tile
    yield from _quick(tile, problem)
    key_lengths = (1, *_around(n, range(1, depth + 3)))
    query_lengths = (1, *_around(m, range(1, 3)), 3 * m + 1)
    for index, keys in enumerate(key_lengths):
        yield Shape(Probe.RANDOM, query_lengths[index * 3 % len(query_lengths)], keys)
    for index, queries in enumerate(query_lengths):
        yield Shape(Probe.RANDOM, queries, key_lengths[(index * 5 + 2) % len(key_lengths)])
    for index, keys in enumerate(key_lengths):
        yield Shape(Probe.FAR_BELOW, query_lengths[(index * 4 + 1) % len(query_lengths)], keys)
    for probe in (Probe.NEEDLE, Probe.FIRST, Probe.LAST):
        yield Shape(probe, m + 1, (depth + 2) * n)
        yield Shape(probe, 1, (depth + 1) * n + 1)
    yield Shape(Probe.RISING, 2 * m, (depth + 2) * n)
    yield Shape(Probe.RISING, m - 1, 2 * n - 1)
    yield Shape(Probe.STEEP, m + 1, (depth + 2) * n)
    yield Shape(Probe.STEEP, 2 * m + 1, 2 * n + 1)
    if problem.dtype.is_quantized:
        yield Shape(Probe.FAINT, m + 1, (depth + 2) * n)
        yield Shape(Probe.FAINT, 2 * m + 1, 2 * n - 1)
    if problem.causal is not Causal.NONE:
        yield from _around_diagonal(tile)


def rounds_of(tile: Tile, *, quick: bool) -> Iterator[Shape]:
    """Yields problems in which persistent programs compute two or three tiles each, to test carried state."""
    m, n, depth = tile
    long = (depth + 1) * n + 1
    if quick:
        yield Shape(Probe.RANDOM, 2 * m + 1, long)
        yield Shape(Probe.RANDOM, 2 * m + 1, 2 * m + 1)
        return
    for _ in ROUNDS:
        yield Shape(Probe.RANDOM, 2 * m + 1, long, SMALL_REPEATS)
    for _ in ROUNDS:
        yield Shape(Probe.NEEDLE, 3 * m, 2 * m + 1, SMALL_REPEATS)


def split_shapes(tile: Tile, parts: int, *, quick: bool) -> Iterator[Shape]:
    """Yields problems with keys around borders of the parts into which tiles split their keys."""
    if parts == 1:
        return
    m, n, _ = tile
    # Keys may be many, so queries are few.
    few, border = m // 4 + 1, parts * n
    yield Shape(Probe.RANDOM, few, border + n + 1)
    yield Shape(Probe.FIRST, few, 2 * border)
    yield Shape(Probe.LAST, few, 2 * border + 1)
    yield Shape(Probe.FAR_BELOW, few, border + 1)
    yield Shape(Probe.STEEP, few, 2 * border - 1)
    if quick:
        return
    lengths = ((1, border), (few, border - 1), (2 * few, 3 * border // 2), (m + 1, border + n))
    for probe in (Probe.RANDOM, Probe.FAR_BELOW, Probe.NEEDLE, Probe.RISING):
        for queries, keys in lengths:
            yield Shape(probe, queries, keys)


def third_tiles(tile: Tile) -> Shape:
    """Returns a problem with three tiles of queries and of keys, of which the last are partly filled."""
    return Shape(Probe.RANDOM, 2 * tile.queries + 1, 2 * tile.keys + 1)


def _around_diagonal(tile: Tile) -> Iterator[Shape]:
    """Yields problems with as many, more and fewer keys than queries. Some rows see at most one key."""
    m, n, depth = tile
    for side in sorted({*_around(m, (1, 2)), *_around(n, (1, 2))}):
        yield Shape(Probe.DIAGONAL, side, side)
    for shift in (1, n - 1, n, n + 1):
        yield Shape(Probe.DIAGONAL, m + 1, m + 1 + shift)
        yield Shape(Probe.DIAGONAL, m + 1 + shift, m + 1)
    yield Shape(Probe.NEEDLE, 2 * m + 1, (depth + 2) * n)
    yield Shape(Probe.RANDOM, 3 * m + 1, 1)


def _around(side: int, multiples: Iterable[int]) -> tuple[int, ...]:
    """Returns lengths one below, at and one above multiples of a tile's side, up to LONGEST."""
    lengths = (multiple * side + step for multiple in multiples for step in (-1, 0, 1))
    return tuple(length for length in lengths if length <= LONGEST)
