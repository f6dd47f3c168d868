"""The problems that a backward kernel is put through: `flashtune.proof.cases`, for another pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import msgspec

from flashtune.config import Config
from flashtune.features import Feature
from flashtune.problem import Problem
from flashtune.proof import cases as forward
from flashtune.proof.cases import FEW_HEADS, HEADS, SCALES, Case, Level, cases_of
from flashtune.proof.gradients.shapes import (
    Tiles,
    gradient_shapes,
    many_tiles,
    mask_squares,
    tiles_of,
    turns_of,
)
from flashtune.proof.inputs import Layout
from flashtune.proof.probes import Probe
from flashtune.proof.serving_shapes import BATCHES, Posed, beside_plain, even_lengths, with_lengths
from flashtune.proof.serving_shapes import HEADS as POSED_HEADS
from flashtune.proof.shapes import ROUNDS, Shape, Tile, third_tiles

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
