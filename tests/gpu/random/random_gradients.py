"""Random backward problems over all features and their pairs, for every family that computes gradients.

    python -m tests.gpu.random.random_gradients 500 --seed 1

draws so many problems, compiles their kernels on all cores, and compares each gradient with the reference on
the GPU. It prints the errors, and the largest share of an allowed error by family and by gradient.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from benchmarks.saved import save
from flashtune.core.config import Config
from flashtune.core.layouts import DENSE_LAYOUTS
from flashtune.core.problem import Causal, Direction, Feature, Problem
from flashtune.core.target import Target, device_target
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.verification.cases import SCALES, Case
from flashtune.verification.gradients.cases import tiles_of
from flashtune.verification.lengths import Lengths, is_ragged
from flashtune.verification.probes import Probe
from tests.gpu.random.random_cases import HEADS, LONGEST, MAX_PAIRS
from tests.gpu.random.random_problems import DRAWN, Subject, Trial, draw_subject

# Kernels of each family at other widths, types and configs, without any feature.
PLAIN_KERNELS = 24
# Features that no family computes gradients of.
FORWARD_ALONE = {Feature.PAGES, Feature.QUANTIZED_KV, Feature.MLA}
PROBES = (Probe.RANDOM, Probe.RANDOM, Probe.FAR_BELOW, Probe.NEEDLE, Probe.LAST, Probe.RISING)


def feature_sets() -> tuple[frozenset[Feature], ...]:
    """No feature, each by itself, and every pair."""
    drawn = [feature for feature in DRAWN if feature not in FORWARD_ALONE]
    singles = [frozenset({feature}) for feature in drawn]
    return (frozenset(), *singles, *(frozenset(pair) for pair in itertools.combinations(drawn, 2)))


def subjects(seed: int, target: Target) -> Iterator[Subject]:
    """Several kernels without a feature and one for each set of them, of each family that computes it."""
    chance = random.Random(seed)
    own = [family for family in families() if family.direction is Direction.BACKWARD]
    plain = [frozenset[Feature]()] * PLAIN_KERNELS
    for asked, family in itertools.product((*plain, *feature_sets()), own):
        subject = draw_subject(asked, family, chance, target)
        if subject is not None:
            yield subject


def trials(count: int, seed: int, target: Target, most: int | None = None) -> Iterator[Trial]:
    """So many random problems, assigned to all subjects in turn; the same ones for the same seed.

    Args:
        count: How many.
        seed: Decides all.
        target: The GPU.
        most: Kernels at the most, where not all shall be compiled: some of the subjects, at random.
    """
    kernels = list(subjects(seed, target))
    chance = random.Random(f"{seed} gradients")
    if most is not None and most < len(kernels):
        kernels = chance.sample(kernels, most)
    for subject in itertools.islice(itertools.cycle(kernels), count):
        yield Trial(subject, _case(subject, chance, target))


def _case(subject: Subject, chance: random.Random, target: Target) -> Case:
    family: Family = find_family(subject.family)
    while True:
        case = random_gradients(chance, subject.problem, subject.config)
        if unsupported_reason(family, case.problem, target, subject.specialization) is None:
            return case


def random_gradients(chance: random.Random, problem: Problem, config: Config) -> Case:
    """A case that a backward kernel of this problem and config can be launched on."""
    tiles = tiles_of(config, reduced=False)
    kv_heads = chance.choice((1, 1, 2, 3))
    batch = chance.choice((1, 2, 3, 5)) if is_ragged(problem) else chance.choice((1, 1, 2, 3))
    masks = [width for width in (problem.window_left, problem.chunk) if width]
    drawn = _lengths(chance, problem, batch, [*tiles.queries, *masks], [*tiles.keys, *masks])
    queries, keys = max(1, *drawn.queries), max(1, *drawn.keys)
    spare = chance.choice((0, 0, 1, 40)) if problem.kv_lengths and not problem.packed else 0
    # Masks and biases of all pairs at once are what a check holds in memory.
    group = min(chance.choice(HEADS), max(1, MAX_PAIRS // (batch * kv_heads * queries * keys)))
    more: tuple[Probe, ...] = (Probe.SINK,) if problem.sinks else ()
    more += (Probe.EDGE, Probe.EDGE) if problem.features or problem.causal is not Causal.NONE else ()
    return Case(
        problem=msgspec.structs.replace(
            problem,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            batch=batch,
            seqlen_q=queries,
            seqlen_kv=keys + spare,
            packed=drawn.total_q if problem.packed else 0,
        ),
        probe=chance.choice((*PROBES, *more)),
        block=tiles.least,
        scale=chance.choice(SCALES) * problem.head_dim**-0.5,
        layout=chance.choice(DENSE_LAYOUTS),
        repeats=2,
        lengths=drawn if is_ragged(problem) else msgspec.UNSET,
    )


def _lengths(
    chance: random.Random, problem: Problem, batch: int, of_queries: list[int], of_keys: list[int]
) -> Lengths:
    """Of each sequence; where they may differ, some have no key, a single one, or no query."""
    if not is_ragged(problem):
        queries, keys = _length(chance, of_queries), _length(chance, of_keys)
        return Lengths((queries,) * batch, ((queries if chance.random() < 0.2 else keys),) * batch)
    keys_of = [0 if chance.random() < 0.15 else _length(chance, of_keys) for _ in range(batch)]
    if not problem.packed:
        return Lengths((_length(chance, of_queries),) * batch, tuple(keys_of))
    rows = [0 if chance.random() < 0.15 else _length(chance, of_queries) for _ in range(batch)]
    if not any(rows):
        rows[chance.randrange(batch)] = _length(chance, of_queries)
    return Lengths(tuple(rows), tuple(keys_of))


def _length(chance: random.Random, sides: list[int]) -> int:
    side = chance.choice(sides)
    near = side * chance.randint(1, 5) + chance.choice((-1, 0, 1))
    return min(LONGEST, max(1, chance.choice((1, near, near, near, chance.randint(1, 4 * side)))))


def main() -> int:
    """Draws, compiles and checks problems, and prints the errors."""
    from tests.gpu.random.random_checks import check_all

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", type=int, help="compile at most so many kernels, for a short run")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the summary, in JSON")
    arguments = parser.parse_args()
    target = device_target(0)
    drawn = list(trials(arguments.count, arguments.seed, target, arguments.kernels))
    summary = check_all(drawn, target, arguments.seed, click.echo)
    click.echo(msgspec.json.format(msgspec.json.encode(summary)).decode())
    if arguments.save:
        save(arguments.save, summary)
    return 1 if summary.wrong or summary.refused else 0


if __name__ == "__main__":
    sys.exit(main())
