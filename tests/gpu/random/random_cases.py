"""A random problem for a kernel: lengths near tile sides, any head sharing, any valid probe."""

import random
from collections.abc import Callable

import msgspec

from flashtune.core.config import Config
from flashtune.core.layouts import DENSE_LAYOUTS
from flashtune.core.problem import Causal, Problem
from flashtune.verification.cases import SCALES, Case, splits_of, tile_of
from flashtune.verification.gradients.cases import tiles_of
from flashtune.verification.lengths import Lengths, is_ragged
from flashtune.verification.probes import Probe

LONGEST = 1400
MAX_PAIRS = 2**26
FORWARD_PROBES = (Probe.RANDOM,) * 3 + (Probe.FAR_BELOW, Probe.NEEDLE, Probe.RISING, Probe.EDGE)
BACKWARD_PROBES = (Probe.RANDOM,) * 2 + (Probe.FAR_BELOW, Probe.NEEDLE, Probe.LAST, Probe.RISING)
DECODED = (1, 1, 1, 2, 3, 4, 5, 8, 16)
HEADS = (1, 2, 3, 4, 5, 8)
Draw = Callable[[], int]


def random_case(chance: random.Random, problem: Problem, config: Config) -> Case:
    """Returns a case that a kernel can be launched on, whatever its family refuses."""
    kv_heads = 1 if problem.mla else chance.choice((1, 1, 2, 3))
    group = chance.choice((*HEADS, 16, 32) if problem.mla else HEADS)
    batch = chance.choice((1, 2, 3, 5, 8)) if is_ragged(problem) else chance.choice((1, 1, 2, 3))
    drawn = _lengths(chance, problem, config, batch)
    longest_q, longest_kv = max(1, *drawn.queries), max(1, *drawn.keys)
    if problem.page_size:
        longest_kv = (-(-longest_kv // problem.page_size) + chance.choice((0, 0, 1, 3))) * problem.page_size
    elif problem.kv_lengths and not (problem.is_backward and problem.packed):
        longest_kv += chance.choice((0, 0, 1, 40))
    # Masks and biases of all pairs at once are what a check holds in memory.
    group = min(group, max(1, MAX_PAIRS // (batch * kv_heads * longest_q * longest_kv)))
    return Case(
        problem=msgspec.structs.replace(
            problem,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            batch=batch,
            seqlen_q=longest_q,
            seqlen_kv=longest_kv,
            packed=drawn.total_q if problem.packed else 0,
        ),
        probe=_probe(chance, problem),
        block=tiles_of(config, reduced=False).least if problem.is_backward else tile_of(config)[1],
        scale=chance.choice(SCALES) * problem.head_dim**-0.5,
        layout=chance.choice(DENSE_LAYOUTS),
        repeats=2,
        lengths=drawn if is_ragged(problem) else msgspec.UNSET,
    )


def _probe(chance: random.Random, problem: Problem) -> Probe:
    more: tuple[Probe, ...] = (Probe.SINK, Probe.SINK) if problem.sinks else ()
    masked = problem.features or problem.causal is not Causal.NONE
    more += (Probe.EDGE, Probe.EDGE) if masked else ()
    probes: tuple[Probe, ...] = BACKWARD_PROBES if problem.is_backward else FORWARD_PROBES
    return chance.choice((*probes, *more))


def _draws(chance: random.Random, problem: Problem, config: Config) -> tuple[Draw, Draw]:
    """Returns functions that draw the number of queries and of keys of a sequence."""
    masks = [width for width in (problem.window_left, problem.chunk) if width]
    if problem.is_backward:
        tiles = tiles_of(config, reduced=False)
        queries, keys = [*tiles.queries, *masks], [*tiles.keys, *masks]
        return (lambda: _length(chance, queries, 5)), (lambda: _length(chance, keys, 5))
    splits, (tile, block) = splits_of(config), tile_of(config)
    masks += [width for width in (problem.page_size, problem.block_mask) if width]
    own = [tile // int(getattr(config, "pack_gqa", 1)) or 1, *filter(None, (problem.block_mask,))]
    sides = [block, block, block * max(1, splits), *masks]
    if splits:
        return (lambda: chance.choice(DECODED)), (lambda: _length(chance, sides, 4))
    return (lambda: _length(chance, own, 4)), (lambda: _length(chance, sides, 4))


def _lengths(chance: random.Random, problem: Problem, config: Config, batch: int) -> Lengths:
    """Of each sequence; where they may differ, some have no key, a single one, or no query."""
    queries, keys = _draws(chance, problem, config)
    if not is_ragged(problem):
        seqlen_q, seqlen_kv = queries(), keys()
        if not splits_of(config) and chance.random() < 0.2:
            seqlen_kv = seqlen_q
        return Lengths((seqlen_q,) * batch, (seqlen_kv,) * batch)
    some = [0 if chance.random() < 0.15 else 1 if chance.random() < 0.1 else keys() for _ in range(batch)]
    if not problem.packed:
        return Lengths((queries(),) * batch, tuple(some))
    rows = [0 if chance.random() < 0.15 else queries() for _ in range(batch)]
    if not any(rows):
        rows[chance.randrange(batch)] = queries()
    return Lengths(tuple(rows), tuple(some))


def _length(chance: random.Random, sides: list[int], tiles: int) -> int:
    """Returns a length of up to so many tiles, mostly near a multiple of one of these sides."""
    side = chance.choice(sides)
    near = side * chance.randint(1, tiles) + chance.choice((-1, 0, 1))
    return min(LONGEST, max(1, chance.choice((1, near, near, chance.randint(1, (tiles - 1) * side)))))
