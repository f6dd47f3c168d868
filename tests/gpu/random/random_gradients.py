"""Random backward problems over all features and their pairs, for every family that computes gradients.

    python -m tests.gpu.random.random_gradients 500 --seed 1

draws so many problems, compiles their kernels on all cores, and compares each gradient with the reference on
the GPU. It prints the errors, and the largest share of an allowed error by family and by gradient.
"""

import itertools
import random
import sys
from collections.abc import Iterator

from flashtune.core.problem import Direction, Feature
from flashtune.core.target import Target
from flashtune.templates.registry import families
from tests.gpu.random.random_problems import DRAWN, Subject, Trial, case_of, draw_subject, run

# Kernels of each family at other widths, types and configs, without any feature.
PLAIN_KERNELS = 24
# Features that no family computes gradients of.
FORWARD_ALONE = {Feature.FUNCTIONS, Feature.PAGES, Feature.QUANTIZED_KV, Feature.MLA, Feature.TREE}


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
        yield Trial(subject, case_of(subject, chance, target))


if __name__ == "__main__":
    sys.exit(run(trials, __doc__, 500))
