"""The companion problems of a check: which shapes, probes and layouts a config is put through.

A kernel's source depends on no length, head count or batch, so one binary takes all of them.
Lengths lie around the multiples of both sides of the tile, up to more blocks than the pipeline has
stages, because a tail mask, a prologue or an epilogue fails at a border or nowhere.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator

import msgspec

from flashtune.config import Config
from flashtune.problem import Causal, Problem
from flashtune.proof.inputs import Layout
from flashtune.proof.probes import Probe

TENSORS = ("q", "k", "v", "out")
# Sides of a tile where a config does not name them.
DEFAULT_TILE = (128, 128)
# Blocks of keys that ragged lengths go up to; deeper pipelines than this fill all the same.
MAX_BLOCKS = 6
LONGEST = 1536
# Heads, KV heads and batch, in turn.
HEADS = ((4, 2, 1), (3, 1, 2), (2, 2, 2), (1, 1, 1), (6, 3, 1))
FEW_HEADS = ((4, 2, 1), (1, 1, 2), (2, 2, 1))
# Heads, KV heads and batch whose tiles, three a head, are more than a GPU has multiprocessors (108 to 148):
# 195 are two rounds, 315 are three, and the last one is not whole.
ROUNDS = ((13, 1, 5), (15, 5, 7))
SCALES = (1.0, 0.6, 1.7)
MAIN_REPEATS = 4
SMALL_REPEATS = 3
# The tuned shape is thinned out beyond this many bytes of inputs and output.
MAX_MAIN_BYTES = 2**31


class Level(enum.Enum):
    """How much is checked.

    quick   A self-check before first use: a dozen small problems.
    full    A search's candidate: the tuned shape, and every border of the tile.
    strict  An audit: ten times the probes of full, and tensors beyond 2^31 elements.
    """

    QUICK = "quick"
    FULL = "full"
    STRICT = "strict"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One problem to launch a kernel on.

    Attributes:
        problem: Shape, type and mask.
        probe: What q, k and v hold.
        block: Keys of the tile that the probe is made for.
        scale: Softmax scale.
        layout: Order of heads and positions in memory.
        repeats: Launches that must agree bit for bit.
        far: Which of q, k, v, out spans more than 2^31 elements, if any.
    """

    problem: Problem
    probe: Probe
    block: int
    scale: float
    layout: Layout = Layout.BHSD
    repeats: int = 1
    far: int | None = None

    @property
    def label(self) -> str:
        """The case in a few words, for a verdict."""
        problem = self.problem
        lengths = f"q={problem.seqlen_q} kv={problem.seqlen_kv}"
        heads = f"heads={problem.heads}x{problem.kv_heads} batch={problem.batch}"
        far = "" if self.far is None else f" {TENSORS[self.far]} beyond 2^31"
        return f"{self.probe} {lengths} {heads} {self.layout}{far}"


class Shape(msgspec.Struct, frozen=True):
    """A probe at a pair of lengths."""

    probe: Probe
    seqlen_q: int
    seqlen_kv: int
    repeats: int = 1


def tile_of(config: Config) -> tuple[int, int]:
    """Queries and keys of a config's tile: its `block_m` and `block_n`."""
    block_m, block_n = DEFAULT_TILE
    return int(getattr(config, "block_m", block_m)), int(getattr(config, "block_n", block_n))


def companions(problem: Problem, config: Config, level: Level, *, reduced: bool) -> tuple[Case, ...]:
    """The small problems of a level, in a fixed order.

    Args:
        problem: The problem that a kernel is for.
        config: The kernel's config: its tile and pipeline decide the lengths.
        level: How much is checked.
        reduced: Whether to make do with fewer heads and blocks, as an interpreter needs.
    """
    block_m, block_n = tile_of(config)
    depth = 1 if reduced else min(config.num_stages, MAX_BLOCKS - 2)
    causal = problem.causal is not Causal.NONE
    quick = level is Level.QUICK
    shapes = (_quick if quick else _full)(block_m, block_n, depth, causal)
    if reduced:
        cases = _cases(problem, shapes, block_n, FEW_HEADS)
        # Nothing races in an interpreter, and programs run one after the other.
        return tuple(msgspec.structs.replace(case, repeats=1) for case in cases)
    # Heads that share a tile: some must be left over for a tile of their own.
    pack = getattr(config, "pack", 1)
    heads = HEADS if pack == 1 else (*HEADS, (2 * pack + 1, 1, 1))
    rounds = _rounds(block_m, block_n, depth, quick)
    return (*_cases(problem, shapes, block_n, heads), *_cases(problem, rounds, block_n, ROUNDS))


def main_cases(problem: Problem) -> tuple[Case, ...]:
    """The tuned shape itself, its batch and heads thinned out where memory would not hold it."""
    if not (problem.batch and problem.seqlen_q and problem.seqlen_kv):
        return ()
    fitting = _thinned(problem)
    # The block is a fixed one, so that configs with different tiles share inputs and reference.
    common = {"problem": fitting, "block": 64, "scale": problem.head_dim**-0.5}
    return (
        Case(probe=Probe.RANDOM, repeats=MAIN_REPEATS, layout=Layout.BSHD, **common),
        Case(probe=Probe.NEEDLE, **common),
    )


def far_cases(problem: Problem, config: Config) -> tuple[Case, ...]:
    """Small problems of which one tensor at a time spans more than 2^31 elements."""
    block_m, block_n = tile_of(config)
    small = msgspec.structs.replace(
        problem, batch=2, heads=2, kv_heads=1, seqlen_q=block_m + 1, seqlen_kv=2 * block_n + 1
    )
    return tuple(
        Case(problem=small, probe=Probe.RANDOM, block=block_n, scale=problem.head_dim**-0.5, far=tensor)
        for tensor in range(len(TENSORS))
    )


def _thinned(problem: Problem) -> Problem:
    while problem.minimal_bytes() > MAX_MAIN_BYTES:
        if problem.batch > 1:
            problem = msgspec.structs.replace(problem, batch=problem.batch // 2)
        elif problem.kv_heads > 1:
            fewer = problem.kv_heads // 2
            problem = msgspec.structs.replace(problem, kv_heads=fewer, heads=fewer * problem.group_size)
        else:
            break
    return problem


def _cases(
    problem: Problem, shapes: Iterable[Shape], block: int, heads: tuple[tuple[int, int, int], ...]
) -> Iterator[Case]:
    turns = zip(itertools.cycle(heads), itertools.cycle(SCALES), itertools.cycle(Layout))
    for shape, ((many, kv_heads, batch), factor, layout) in zip(shapes, turns, strict=False):
        yield Case(
            problem=msgspec.structs.replace(
                problem,
                heads=many,
                kv_heads=kv_heads,
                batch=batch,
                seqlen_q=max(1, shape.seqlen_q),
                seqlen_kv=max(1, shape.seqlen_kv),
            ),
            probe=shape.probe,
            block=block,
            scale=factor * problem.head_dim**-0.5,
            layout=layout,
            repeats=shape.repeats,
        )


def _quick(m: int, n: int, depth: int, causal: bool) -> Iterator[Shape]:
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
    if causal:
        yield Shape(Probe.DIAGONAL, 2 * side, 2 * side)
        yield Shape(Probe.DIAGONAL, m + 1, long)


def _full(m: int, n: int, depth: int, causal: bool) -> Iterator[Shape]:
    yield from _quick(m, n, depth, causal)
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
    if causal:
        yield from _around_diagonal(m, n, depth)


def _rounds(m: int, n: int, depth: int, quick: bool) -> Iterator[Shape]:
    """Programs that take one tile after the other, two or three each: what they carry over must be right."""
    long = (depth + 1) * n + 1
    if quick:
        yield Shape(Probe.RANDOM, 2 * m + 1, long)
        yield Shape(Probe.RANDOM, 2 * m + 1, 2 * m + 1)
        return
    for _ in ROUNDS:
        yield Shape(Probe.RANDOM, 2 * m + 1, long, SMALL_REPEATS)
    for _ in ROUNDS:
        yield Shape(Probe.NEEDLE, 3 * m, 2 * m + 1, SMALL_REPEATS)


def _around_diagonal(m: int, n: int, depth: int) -> Iterator[Shape]:
    """Square problems, more keys than queries and fewer: rows that see nothing, or a key at most."""
    for side in sorted({*_around(m, (1, 2)), *_around(n, (1, 2))}):
        yield Shape(Probe.DIAGONAL, side, side)
    for shift in (1, n - 1, n, n + 1):
        yield Shape(Probe.DIAGONAL, m + 1, m + 1 + shift)
        yield Shape(Probe.DIAGONAL, m + 1 + shift, m + 1)
    yield Shape(Probe.NEEDLE, 2 * m + 1, (depth + 2) * n)
    yield Shape(Probe.RANDOM, 3 * m + 1, 1)


def _around(side: int, multiples: Iterable[int]) -> tuple[int, ...]:
    """Lengths one below, at and one above multiples of a tile's side, none beyond the longest."""
    lengths = (multiple * side + step for multiple in multiples for step in (-1, 0, 1))
    return tuple(length for length in lengths if length <= LONGEST)
