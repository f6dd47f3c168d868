"""The test cases of a backward kernel: their lengths and probes.

A backward pass iterates over keys for one gradient and over queries for the others, in tiles that may differ.
Both lengths are therefore chosen around multiples of each tile side, up to more blocks than a pipeline has
stages. Tile sides are powers of two, so multiples of a larger one are multiples of the smaller.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from flashtune.core.config import Config
from flashtune.core.problem import Bias, Causal, Feature, Problem
from flashtune.verification import cases as forward
from flashtune.verification.cases import FEW_HEADS, HEADS, Case, Level, cases_of, served_cases
from flashtune.verification.probes import Probe
from flashtune.verification.serving_shapes import (
    BATCHES,
    FARTHEST_REDUCED,
    FARTHEST_SQUARE,
    ServingCase,
    border_shapes,
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

# Most pairs of queries and keys, of two KV heads, in the reference of the tuned shape. Beyond, the group size
# is reduced, because the reference needs all heads of a group at once.
MAX_MAIN_SCORES = 2**31
# Kernels that copy tiles of a bias by TMA need rows of a multiple of 16 bytes: 8 keys in 16 bits each.
BIAS_STEP = 8


def companions(problem: Problem, config: Config, level: Level, *, reduced: bool) -> tuple[Case, ...]:
    """Returns the small problems of a level in a fixed order.

    The config's tiles and pipelines determine the lengths. An interpreter needs `reduced` heads and blocks.
    """
    tiles = tiles_of(config, reduced=reduced)
    quick = level is Level.QUICK
    shapes = (*_quick(tiles, problem), *(() if quick else _full(tiles, problem)))
    tile = Tile(tiles.queries[-1], tiles.keys[-1], tiles.depth)
    # Problems with more tiles than a GPU runs at once.
    rounds = () if reduced else tuple(rounds_of(tile, quick=quick))
    if not quick:
        rounds = tuple(msgspec.structs.replace(shape, repeats=RACE_REPEATS) for shape in rounds)
    if reduced:
        # No other reduced problem has three tiles of queries and of keys in full attention.
        shapes += (third_tiles(tile),)
    if problem.deterministic and not quick and not reduced:
        rounds += tuple(turns_of(tile))
    if problem.bias is Bias.ADDITIVE:
        shapes = tuple(dict.fromkeys((*shapes, *_in_steps(shapes))))
        rounds = _in_steps(rounds)
    if problem.features - {Feature.DETERMINISTIC}:
        problems = _with_features(problem, shapes, tile, rounds, quick=quick, reduced=reduced)
        return tuple(served_cases(problem, problems, tiles.least))
    heads = FEW_HEADS if reduced else HEADS
    block = tiles.least
    return (*cases_of(problem, shapes, block, heads), *cases_of(problem, rounds, block, ROUNDS))


def _in_steps(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Returns shapes with their numbers of keys rounded up to BIAS_STEP."""
    stepped = (-(-shape.seqlen_kv // BIAS_STEP) * BIAS_STEP for shape in shapes)
    pairs = zip(shapes, stepped, strict=True)
    return tuple(msgspec.structs.replace(shape, seqlen_kv=keys) for shape, keys in pairs)


def main_cases(problem: Problem) -> tuple[Case, ...]:
    """Returns cases of the tuned shape, with fewer sequences and heads to limit memory and time."""
    cases = forward.main_cases(problem)
    return tuple(msgspec.structs.replace(case, problem=_smaller_groups(case.problem)) for case in cases)


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
) -> Iterator[ServingCase]:
    """Yields the plain problems with sequences of different lengths, and problems at the borders of masks."""
    borders = border_shapes(tile, problem, quick=quick, reduced=reduced, decoding=False)
    square = mask_squares(tile, problem, quick=quick, reduced=reduced)
    for turn, shape in enumerate((*shapes, Shape(Probe.EDGE, *tile[:2]), *borders, *square)):
        # The probe `edge` replaces `diagonal`.
        edge = shape.probe is Probe.DIAGONAL
        posed = msgspec.structs.replace(shape, probe=Probe.EDGE) if edge else shape
        heads, batch = POSED_HEADS[turn % len(POSED_HEADS)], BATCHES[turn % len(BATCHES)]
        yield with_lengths(problem, posed, heads, turn, batch, quick=quick)
    for shape, (many, kv_heads, batch) in zip(rounds, itertools.cycle(ROUNDS), strict=False):
        yield even_lengths(problem, shape, (many, kv_heads), batch)


# Names of a tile's sides in configs: of the first kernel, and of a second one that recomputes the scores.
QUERY_SIDES, KEY_SIDES = ("block_m", "dq_block_m"), ("block_n", "dq_block_n")
STAGES = ("num_stages", "dq_stages")
DEFAULT_SIDE = 128
# Launches of problems with many tiles. Some races give a wrong result only once in thousands of steps.
RACE_REPEATS = 24


class Tiles(NamedTuple):
    """The tiles of a config."""

    queries: tuple[int, ...]  # Distinct sides along queries, ascending.
    keys: tuple[int, ...]  # Distinct sides along keys, ascending.
    depth: int  # Number of blocks in flight.

    @property
    def least(self) -> int:
        """The smallest side. A needle in each block of this size is also one in each larger block."""
        return min(*self.queries, *self.keys)


def tiles_of(config: Config, *, reduced: bool) -> Tiles:
    """Returns the tiles of a config. If `reduced`, one block is in flight, as in an interpreter."""

    def named(names: tuple[str, ...]) -> tuple[int, ...]:
        sides = {int(getattr(config, name)) for name in names if hasattr(config, name)}
        return tuple(sorted(sides)) or (DEFAULT_SIDE,)

    stages = max(int(getattr(config, name, 1)) for name in STAGES)
    depth = 1 if reduced else min(stages, MAX_BLOCKS - 2)
    return Tiles(named(QUERY_SIDES), named(KEY_SIDES), depth)


def turns_of(tile: Tile) -> Iterator[Shape]:
    """Yields problems with many more blocks of keys than a GPU runs at once.

    In deterministic kernels, later blocks then wait for the sums of earlier ones.
    """
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
        # Steps of three and five usually reach all lengths, as they rarely divide their number.
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
    """Yields problems with as many, more and fewer keys than queries. Some rows or keys are fully masked."""
    m, n = tiles.queries[-1], tiles.keys[-1]
    for side in _lengths((*tiles.queries, *tiles.keys), 2)[1:]:
        yield Shape(Probe.DIAGONAL, side, side)
    for shift in (1, n - 1, n, n + 1):
        yield Shape(Probe.DIAGONAL, m + 1, m + 1 + shift)
        yield Shape(Probe.DIAGONAL, m + 1 + shift, m + 1)
    yield Shape(Probe.NEEDLE, 2 * m + 1, (tiles.depth + 2) * n)
    yield Shape(Probe.NEEDLE, (tiles.depth + 2) * m, 2 * n + 1)


def mask_squares(tile: Tile, problem: Problem, *, quick: bool, reduced: bool) -> Iterator[Shape]:
    """Yields problems with about as many queries as keys. No query sees some of the keys."""
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
    """Returns 1, and lengths around multiples of the sides up to LONGEST."""
    around = {
        multiple * side + step
        for side in sides
        for multiple in range(1, multiples + 1)
        for step in (-1, 0, 1)
    }
    return [1, *sorted(length for length in around if length <= LONGEST)]
