"""Shapes of the problems that verify decoding kernels, and kernels with varlen, mask or cache features.

Windows, chunks and first tokens are compile-time constants, so lengths are also chosen around these. Sequence
lengths, pages and splits add further borders. Sequences have different lengths where the problem permits it:
some have no key, one key, or no query.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from flashtune.core.problem import Causal, Problem
from flashtune.verification.lengths import Lengths, is_ragged
from flashtune.verification.probes import Probe
from flashtune.verification.shapes import (
    SMALL_REPEATS,
    Shape,
    Tile,
    rounds_of,
    shapes_of,
    split_shapes,
    third_tiles,
)

# Largest windows and chunks that a check covers: with few queries, with as many queries as keys, and in an
# interpreter.
FARTHEST, FARTHEST_SQUARE, FARTHEST_REDUCED = 2**15 + 1, 2**13 + 1, 600
# Heads and KV heads of successive problems. In decoding more heads share a KV head, with latent keys all do.
HEADS = ((4, 2), (3, 1), (2, 2), (1, 1), (6, 3))
DECODE_HEADS = ((8, 2), (4, 4), (16, 1), (6, 3), (32, 4), (7, 1))
LATENT_HEADS = ((16, 1), (5, 1), (32, 1), (128, 1))
BATCHES = (1, 2, 2, 1, 3)
# An interpreter runs programs one by one, so there are fewer KV heads and sequences. Groups are as large.
FEW_HEADS = ((4, 2), (3, 1), (2, 2), (1, 1), (2, 1))
FEW_DECODE_HEADS = ((8, 2), (2, 2), (16, 1), (4, 2), (8, 1), (7, 1))
FEW_BATCHES = (1, 1, 2, 1, 2)
# Blocks of keys of a problem whose lists are longer than a step of a kernel's search in them, 128 elements.
LONG_LIST = 300
# Rows of a decoding tile: queries times heads that share a KV head.
DECODE_ROWS, LATENT_ROWS = 64, 128
# Group size of the problem that fills three tiles of rows, and the most splits that have three blocks in it.
DECODED_GROUP, FEW_PARTS = 16, 8
# Enough sequences and KV heads for several waves of programs, with at least two splits each.
MANY_HEADS, MANY_BATCH = (8, 4), 41


class ServingCase(NamedTuple):
    """A shape with the heads and sequence lengths of a test case."""

    shape: Shape  # The probe, and lengths that are at least those of the longest sequence.
    heads: tuple[int, int]  # Query heads and KV heads.
    lengths: Lengths
    ragged: bool  # Whether the kernel gets the lengths.


def serving_cases(
    tile: Tile, splits: int, problem: Problem, *, quick: bool, reduced: bool, parts: int = 1
) -> Iterator[ServingCase]:
    """Yields the problems of a check in a fixed order.

    In decoding, the tile's queries are rows: queries times heads that share a KV head. `splits` is 0 for a
    kernel that does not decode. Tiles of such a kernel may have `parts` of their keys. An interpreter needs
    `reduced` problems.
    """
    shapes = _decoding(tile, splits, quick) if splits else _plain(tile, problem, quick)
    borders = border_shapes(tile, problem, quick=quick, reduced=reduced, decoding=splits > 0)
    plain, decoding = (FEW_HEADS, FEW_DECODE_HEADS) if reduced else (HEADS, DECODE_HEADS)
    turns = LATENT_HEADS if problem.mla else decoding if splits else plain
    batches = FEW_BATCHES if reduced else BATCHES
    for turn, shape in enumerate((*shapes, *borders, *split_shapes(tile, parts, quick=quick))):
        heads = turns[turn % len(turns)]
        few = _few_queries(shape, heads, problem) if splits else shape
        yield with_lengths(problem, few, heads, turn, batches[turn % len(batches)], quick=quick)
    if splits:
        yield _decoded_tiles(tile, splits, problem)
    if reduced:
        if not splits:
            yield with_lengths(problem, third_tiles(tile), plain[0], 0, 1, quick=True)
        return
    if splits:
        long = Shape(Probe.RANDOM, 1, min(2 * splits, 8) * tile.keys + 1, SMALL_REPEATS)
        heads = LATENT_HEADS[0] if problem.mla else MANY_HEADS
        yield even_lengths(problem, long, heads, MANY_BATCH)
        return
    for shape, (many, kv_heads, batch) in zip(
        rounds_of(tile, quick=quick), ((13, 1, 5), (15, 5, 7)) * 2, strict=False
    ):
        yield even_lengths(problem, shape, (many, kv_heads), batch)


def _decoded_tiles(tile: Tile, splits: int, problem: Problem) -> ServingCase:
    """Returns a problem with three tiles of rows per KV head and, if splits are few, three blocks in each."""
    group = max(DECODED_GROUP, tile.queries) if problem.mla else DECODED_GROUP
    queries = 2 * tile.queries // group + 1
    keys = 2 * min(splits, FEW_PARTS) * tile.keys + 1
    if problem.causal is Causal.TOP_LEFT:
        # A third block is visible only if there are as many queries as keys.
        group, queries = 1, 2 * max(tile.queries, tile.keys) + 1
        keys = queries
    lengths = Lengths((queries,), (keys,))
    return ServingCase(Shape(Probe.RANDOM, queries, keys), (group, 1), lengths, is_ragged(problem))


def _plain(tile: Tile, problem: Problem, quick: bool) -> Iterator[Shape]:
    """Yields the shapes of plain problems, with the probe `edge` in place of `diagonal`."""
    for shape in shapes_of(tile, problem, quick=quick):
        edge = shape.probe is Probe.DIAGONAL
        yield msgspec.structs.replace(shape, probe=Probe.EDGE) if edge else shape
    yield Shape(Probe.EDGE, tile.queries + 1, tile.keys + 1)


def _decoding(tile: Tile, splits: int, quick: bool) -> Iterator[Shape]:
    """Yields shapes with few queries, and keys around borders of blocks and splits, or fewer than splits."""
    _, n, depth = tile
    long, border = (depth + 1) * n + n // 2 + 1, splits * n
    yield Shape(Probe.RANDOM, 1, long, SMALL_REPEATS)
    yield Shape(Probe.RANDOM, 1, n + 1)
    yield Shape(Probe.RANDOM, 2, n - 1)
    yield Shape(Probe.RANDOM, 1, 1)
    yield Shape(Probe.FAR_BELOW, 1, n + 1)
    yield Shape(Probe.FAR_BELOW, 4, border + 1)
    yield Shape(Probe.NEEDLE, 1, border + n // 2 + 1)
    yield Shape(Probe.LAST, 3, 2 * n)
    yield Shape(Probe.RISING, 2, border - 1)
    yield Shape(Probe.STEEP, 16, border + n + 1)
    yield Shape(Probe.EDGE, 1, border)
    yield Shape(Probe.EDGE, 5, long)
    # More queries than keys: some rows have no visible key.
    yield Shape(Probe.RANDOM, 5, 2)
    if quick:
        return
    yield Shape(Probe.STEEP, 16, long)
    yield Shape(Probe.STEEP, 8, 3 * border)
    keys = sorted({*_around(n, range(1, depth + 4)), *_around(border, range(1, 4))})
    for index, length in enumerate(keys):
        yield Shape(Probe.RANDOM, (1, 2, 1, 4, 3, 1, 8, 16)[index % 8], length)
        yield Shape(Probe.FAR_BELOW, (1, 4, 1, 2, 16, 5)[index % 6], length)
    for probe in (Probe.NEEDLE, Probe.FIRST, Probe.LAST, Probe.RISING, Probe.EDGE):
        for queries, length in ((1, border), (2, 2 * border + 1), (4, long), (16, border + n - 1)):
            yield Shape(probe, queries, length)


def border_shapes(
    tile: Tile, problem: Problem, *, quick: bool, reduced: bool, decoding: bool
) -> Iterator[Shape]:
    """Yields the additional shapes for borders of masks and pages, and for sinks."""
    queries = 4 if decoding else tile.queries + 1
    lengths = dict.fromkeys(_around_masks(queries, tile, problem, reduced))
    for rows, keys in lengths:
        yield Shape(Probe.EDGE, rows, keys)
        if not quick:
            yield Shape(Probe.RANDOM, rows, keys)
            yield Shape(Probe.FAR_BELOW, rows, keys)
    if problem.block_mask:
        size = problem.block_mask
        yield Shape(Probe.EDGE, size + queries, 3 * size + 1)
        yield Shape(Probe.RANDOM, 2 * size + 1, 5 * size - 1)
        if not quick:
            if not reduced:
                yield Shape(Probe.RANDOM, queries, LONG_LIST * size)
            yield Shape(Probe.FAR_BELOW, size - 1, 4 * size)
            yield Shape(Probe.NEEDLE, size + 1, 6 * size)
    if problem.sinks:
        yield Shape(Probe.SINK, queries, 2 * tile.keys - 1)
        yield Shape(Probe.SINK, 1, tile.keys + 1)
    if problem.page_size:
        page = problem.page_size
        borders = (2 * page + 1,) if quick else _around(page, (1, 2, 3))
        for keys in borders:
            yield Shape(Probe.RANDOM, queries, keys)
            yield Shape(Probe.EDGE, 1, keys)


def _around_masks(queries: int, tile: Tile, problem: Problem, reduced: bool) -> Iterator[tuple[int, int]]:
    """Yields lengths at which a mask hides earlier keys from some rows of a tile, but not from others."""
    n = tile.keys
    farthest = FARTHEST_REDUCED if reduced else FARTHEST
    square = min(farthest, FARTHEST_SQUARE)
    top_left = problem.causal is Causal.TOP_LEFT
    lefts = [] if problem.window_left is None else [problem.window_left + 1]
    lefts += [problem.chunk] if problem.chunk else []
    if problem.window_left is not None and problem.sink_tokens:
        lefts.append(problem.window_left + problem.sink_tokens + 1)
    for border in lefts:
        if top_left and border <= square:
            yield border + queries // 2, border + queries // 2
            yield border + 1, border + n
        elif not top_left and border <= farthest:
            yield queries, border + queries // 2
            yield queries, border + queries + n + 3
            yield 1, border
            yield 1, border + 1
    if problem.chunk and not top_left and 2 * problem.chunk <= farthest:
        yield queries, 2 * problem.chunk + queries // 2
    right = problem.window_right
    if right is not None and problem.causal is Causal.NONE and right <= square:
        yield right + queries, right + queries
        yield right + queries, right + queries + n


def _few_queries(shape: Shape, heads: tuple[int, int], problem: Problem) -> Shape:
    rows = LATENT_ROWS if problem.mla else DECODE_ROWS
    most = max(1, rows * heads[1] // heads[0])
    return msgspec.structs.replace(shape, seqlen_q=min(shape.seqlen_q, most))


def with_lengths(
    problem: Problem, shape: Shape, heads: tuple[int, int], turn: int, batch: int, *, quick: bool
) -> ServingCase:
    """Returns a problem with the longest sequence and shorter ones with border lengths.

    `turn` rotates the order of the sequences.
    """
    queries, keys = max(1, shape.seqlen_q), max(1, shape.seqlen_kv)
    if not is_ragged(problem):
        return ServingCase(shape, heads, Lengths((queries,) * batch, (keys,) * batch), False)
    if problem.packed:
        pairs = [
            (queries, keys), (0, 0), (1, 1), (queries, -(-keys // 2)), (2, 0), (0, 3),
            (queries // 2 + 1, keys),
        ]  # fmt: skip
    else:
        pairs = [(queries, length) for length in (keys, 0, 1, -(-keys // 2), max(1, keys - 1))]
    pairs = pairs[: len(pairs) - 1 if quick else None]
    turned = pairs[-turn % len(pairs) :] + pairs[: -turn % len(pairs)]
    return ServingCase(shape, heads, Lengths(*(tuple(part) for part in zip(*turned, strict=True))), True)


def even_lengths(problem: Problem, shape: Shape, heads: tuple[int, int], batch: int) -> ServingCase:
    """Returns a problem with sequences of nearly equal lengths, which has many tiles."""
    if problem.mla:
        heads = LATENT_HEADS[0]
    step = 1 if is_ragged(problem) else 0
    queries = tuple(
        max(1, shape.seqlen_q - (step * index if problem.packed else 0)) for index in range(batch)
    )
    keys = tuple(max(1, shape.seqlen_kv - 3 * step * (index % 16)) for index in range(batch))
    return ServingCase(shape, heads, Lengths(queries, keys), step > 0)


def _around(side: int, multiples: Iterable[int]) -> list[int]:
    return [multiple * side + step for multiple in multiples for step in (-1, 0, 1)]
