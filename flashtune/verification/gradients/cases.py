"""Problems for the check of a backward kernel: their lengths and the probe of each.

A backward pass iterates over keys for one gradient and over queries for the others, in tiles that may
differ. Both lengths therefore lie around the multiples of each tile side of a config, up to more blocks than
a pipeline has stages. Tile sides are powers of two: multiples of a larger one are multiples of the smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from flashtune.core.config import Config
from flashtune.core.problem import Causal, Feature, Problem
from flashtune.verification import cases as forward
from flashtune.verification.cases import FEW_HEADS, HEADS, SCALES, Case, Level, cases_of
from flashtune.verification.inputs.guarded_tensors import Layout
from flashtune.verification.probes import Probe
from flashtune.verification.serving_shapes import (
    BATCHES,
    FARTHEST_REDUCED,
    FARTHEST_SQUARE,
    Posed,
    beside_plain,
    even_lengths,
    with_lengths,
)
from flashtune.verification.serving_shapes import HEADS as POSED_HEADS
from flashtune.verification.shapes import (
    LONGEST,
    MAX_BLOCKS,
    ROUNDS,
    SMALL_REPEATS,
    Shape,
    Tile,
    rounds_of,
    third_tiles,
)

# Pairs of queries and keys, of two KV heads, that the tuned shape's reference may have: heads that share
# keys are thinned out beyond it, since all of them are needed at once.
MAX_MAIN_SCORES = 2**31


def companions(problem: Problem, config: Config, level: Level, *, reduced: bool) -> tuple[Case, ...]:
    """The small problems of a level, in a fixed order.

    Args:
        problem: The problem that a kernel is for.
        config: The kernel's config: its tiles and pipelines decide the lengths.
        level: How much is checked.
        reduced: Whether to make do with fewer heads and blocks, as an interpreter needs.
    """
    tiles = tiles_of(config, reduced=reduced)
    quick = level is Level.QUICK
    shapes = tuple(gradient_shapes(tiles, problem, quick=quick))
    tile = Tile(tiles.queries[-1], tiles.keys[-1], tiles.depth)
    rounds = () if reduced else tuple(many_tiles(tile, quick=quick))
    if reduced:
        # Without rounds of tiles nothing else has three tiles of queries and of keys in full attention.
        shapes += (third_tiles(tile),)
    if problem.deterministic and level is not Level.QUICK and not reduced:
        rounds += tuple(turns_of(tile))
    if problem.features - {Feature.DETERMINISTIC}:
        problems = _with_features(problem, shapes, tile, rounds, quick=quick, reduced=reduced)
        cases = tuple(_posed(problem, problems, tiles))
    else:
        heads = FEW_HEADS if reduced else HEADS
        block = tiles.least
        cases = (*cases_of(problem, shapes, block, heads), *cases_of(problem, rounds, block, ROUNDS))
    # Nothing races in an interpreter, and programs run one after the other.
    return tuple(msgspec.structs.replace(case, repeats=1) for case in cases) if reduced else cases


def main_cases(problem: Problem) -> tuple[Case, ...]:
    """The tuned shape itself, with fewer sequences and heads where memory or time would not do."""
    cases = forward.main_cases(problem)
    return tuple(msgspec.structs.replace(case, problem=_smaller_groups(case.problem)) for case in cases)


def far_cases(problem: Problem, config: Config) -> tuple[Case, ...]:
    """Small problems of which one tensor at a time, and its gradient, spans more than 2^31 elements."""
    return forward.far_cases(problem, config)


def _smaller_groups(problem: Problem) -> Problem:
    pairs = max(1, problem.seqlen_q * problem.seqlen_kv * min(2, problem.batch * problem.kv_heads))
    group = min(problem.group_size, max(1, MAX_MAIN_SCORES // pairs))
    return msgspec.structs.replace(problem, heads=group * problem.kv_heads)


def _with_features(
    problem: Problem,
    shapes: tuple[Shape, ...],
    tile: Tile,
    rounds: tuple[Shape, ...],
    *,
    quick: bool,
    reduced: bool,
) -> Iterator[Posed]:
    """The problems of plain kernels with sequences that may differ, and those at the borders of masks."""
    beside = beside_plain(tile, problem, quick=quick, reduced=reduced, decoding=False)
    square = mask_squares(tile, problem, quick=quick, reduced=reduced)
    for turn, shape in enumerate((*shapes, Shape(Probe.EDGE, *tile[:2]), *beside, *square)):
        # What was about the diagonal is about all borders.
        edge = shape.probe is Probe.DIAGONAL
        one = msgspec.structs.replace(shape, probe=Probe.EDGE) if edge else shape
        heads, batch = POSED_HEADS[turn % len(POSED_HEADS)], BATCHES[turn % len(BATCHES)]
        yield with_lengths(problem, one, heads, turn, batch, quick=quick)
    for shape, (many, kv_heads, batch) in zip(rounds, itertools.cycle(ROUNDS), strict=False):
        yield even_lengths(problem, shape, (many, kv_heads), batch)


def _posed(problem: Problem, problems: Iterable[Posed], tiles: Tiles) -> Iterator[Case]:
    turns = zip(itertools.cycle(SCALES), itertools.cycle((Layout.BSHD, Layout.BHSD)))
    for turn, (one, (factor, layout)) in enumerate(zip(problems, turns, strict=False)):
        heads, kv_heads = one.heads
        # Tensors have room for a few keys more than any sequence has, every other time.
        spare = 5 * (turn % 2) if problem.lengths and not problem.packed else 0
        yield Case(
            problem=msgspec.structs.replace(
                problem,
                heads=heads,
                kv_heads=kv_heads,
                batch=len(one.lengths.queries),
                seqlen_q=max(1, *one.lengths.queries),
                seqlen_kv=max(1, *one.lengths.keys) + spare,
                packed=one.lengths.total_q if problem.packed else 0,
            ),
            probe=one.shape.probe,
            block=tiles.least,
            scale=factor * problem.head_dim**-0.5,
            layout=layout,
            repeats=one.shape.repeats,
            lengths=one.lengths if one.ragged else msgspec.UNSET,
        )


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
