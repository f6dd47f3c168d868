"""The lengths of a backward check's problems, and which probe goes with them.

A backward pass walks along keys for one gradient and along queries for the others, in tiles that may differ.
So both lengths lie around the multiples of every side that a config names, up to more blocks than a
pipeline has stages. Sides are powers of two: multiples of a larger one are multiples of all smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from flashtune.config import Config
from flashtune.problem import Causal, Problem
from flashtune.proof.probes import Probe
from flashtune.proof.serving_shapes import FARTHEST_REDUCED, FARTHEST_SQUARE
from flashtune.proof.shapes import LONGEST, MAX_BLOCKS, ROUNDS, SMALL_REPEATS, Shape, Tile, rounds_of

# Names of a tile's sides in configs: of the first kernel, and of another that goes over the scores once more.
QUERY_SIDES, KEY_SIDES = ("block_m", "dq_block_m"), ("block_n", "dq_block_n")
STAGES = ("num_stages", "dq_stages")
DEFAULT_SIDE = 128
# Launches of what has many tiles: some races are lost once in thousands of steps.
RACE_REPEATS = 24


class Tiles(NamedTuple):
    """The tiles of a config.

    Attributes:
        queries: Sides along queries, ascending, each once.
        keys: Sides along keys, likewise.
        depth: Blocks in flight.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    depth: int

    @property
    def least(self) -> int:
        """The smallest side: a needle in each block of it is one in each block of any."""
        return min(*self.queries, *self.keys)


def tiles_of(config: Config, *, reduced: bool) -> Tiles:
    """All tiles that a config names; `reduced` counts one block in flight, as an interpreter has."""

    def named(names: tuple[str, ...]) -> tuple[int, ...]:
        sides = {int(getattr(config, name)) for name in names if hasattr(config, name)}
        return tuple(sorted(sides)) or (DEFAULT_SIDE,)

    stages = max(int(getattr(config, name, 1)) for name in STAGES)
    depth = 1 if reduced else min(stages, MAX_BLOCKS - 2)
    return Tiles(named(QUERY_SIDES), named(KEY_SIDES), depth)


def gradient_shapes(tiles: Tiles, problem: Problem, *, quick: bool) -> Iterator[Shape]:
    """The small problems of a check, in a fixed order."""
    yield from _quick(tiles, problem)
    if not quick:
        yield from _full(tiles, problem)


def many_tiles(tile: Tile, *, quick: bool) -> Iterator[Shape]:
    """More tiles than a GPU works on at once, launched again and again but for a self-check."""
    for shape in rounds_of(tile, quick=quick):
        yield shape if quick else msgspec.structs.replace(shape, repeats=RACE_REPEATS)


def turns_of(tile: Tile) -> Iterator[Shape]:
    """Many more blocks of keys than a GPU works on at once: sums in their order wait for earlier ones."""
    m, n, _ = tile
    for _ in ROUNDS:
        yield Shape(Probe.RANDOM, 2 * m + 1, 8 * n, SMALL_REPEATS)


def _quick(tiles: Tiles, problem: Problem) -> Iterator[Shape]:
    m, n = tiles.queries[-1], tiles.keys[-1]
    long_q, long_k = ((tiles.depth + 1) * side + side // 2 + 1 for side in (m, n))
    side = max(m, n) + 1
    yield Shape(Probe.RANDOM, m + 1, 2 * n - 1, SMALL_REPEATS)
    yield Shape(Probe.RANDOM, 1, n + 1)
    yield Shape(Probe.RANDOM, side, side)
    yield Shape(Probe.RANDOM, 2 * m + 3, n - 1)
    yield Shape(Probe.RANDOM, long_q, 1)
    yield Shape(Probe.FAR_BELOW, m - 1, n + 1)
    yield Shape(Probe.FAR_BELOW, m + 1, n - 1)
    yield Shape(Probe.NEEDLE, m + 1, long_k)
    yield Shape(Probe.NEEDLE, long_q, n + 1)
    yield Shape(Probe.LAST, 2 * m, 2 * n)
    yield Shape(Probe.RISING, m - 1, 2 * n + 1)
    if problem.causal is not Causal.NONE:
        yield Shape(Probe.DIAGONAL, 2 * side, 2 * side)
        yield Shape(Probe.DIAGONAL, m + 1, long_k)
        yield Shape(Probe.DIAGONAL, long_q, n + 1)


def _full(tiles: Tiles, problem: Problem) -> Iterator[Shape]:
    queries, keys = (_lengths(sides, tiles.depth + 2) for sides in (tiles.queries, tiles.keys))
    most = max(len(queries), len(keys))
    for index in range(most):
        # Steps of three and five reach all partners: neither divides how many there are but by chance.
        yield Shape(Probe.RANDOM, queries[index % len(queries)], keys[index * 5 % len(keys)])
        yield Shape(Probe.RANDOM, queries[(index * 3 + 1) % len(queries)], keys[index % len(keys)])
        yield Shape(Probe.FAR_BELOW, queries[index % len(queries)], keys[(index * 3 + 2) % len(keys)])
    m, n = tiles.queries[-1], tiles.keys[-1]
    long_q, long_k = ((tiles.depth + 2) * side for side in (m, n))
    for probe in (Probe.NEEDLE, Probe.FIRST, Probe.LAST):
        yield Shape(probe, m + 1, long_k)
        yield Shape(probe, long_q, n + 1)
        yield Shape(probe, long_q + 1, long_k - 1)
    yield Shape(Probe.RISING, 2 * m, long_k)
    yield Shape(Probe.RISING, long_q, 2 * n - 1)
    if problem.causal is not Causal.NONE:
        yield from _around_diagonal(tiles)


def _around_diagonal(tiles: Tiles) -> Iterator[Shape]:
    """Square problems, more keys than queries and fewer: rows that see nothing, keys that nobody sees."""
    m, n = tiles.queries[-1], tiles.keys[-1]
    for side in _lengths((*tiles.queries, *tiles.keys), 2)[1:]:
        yield Shape(Probe.DIAGONAL, side, side)
    for shift in (1, n - 1, n, n + 1):
        yield Shape(Probe.DIAGONAL, m + 1, m + 1 + shift)
        yield Shape(Probe.DIAGONAL, m + 1 + shift, m + 1)
    yield Shape(Probe.NEEDLE, 2 * m + 1, (tiles.depth + 2) * n)
    yield Shape(Probe.NEEDLE, (tiles.depth + 2) * m, 2 * n + 1)


def mask_squares(tile: Tile, problem: Problem, *, quick: bool, reduced: bool) -> Iterator[Shape]:
    """As many queries as keys or more, so that some keys are seen by no query behind a window or a chunk."""
    m, n = tile.queries, tile.keys
    left = 0 if problem.window_left is None else problem.window_left + 1
    farthest = FARTHEST_REDUCED if reduced else FARTHEST_SQUARE
    for border in sorted({left, problem.chunk} - {0}):
        if border <= farthest:
            yield Shape(Probe.EDGE, border + m // 2 + 1, border + m // 2 + 1)
            if quick:
                continue
            yield Shape(Probe.RANDOM, border + m + 3, border + n - 1)
            yield Shape(Probe.NEEDLE, border + n + 1, border + n + 1)


def _lengths(sides: tuple[int, ...], multiples: int) -> list[int]:
    """One, and lengths around multiples of sides, none beyond the longest."""
    around = {
        multiple * side + step
        for side in sides
        for multiple in range(1, multiples + 1)
        for step in (-1, 0, 1)
    }
    return [1, *sorted(length for length in around if length <= LONGEST)]
