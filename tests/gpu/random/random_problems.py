"""Random problems over all serving features and their pairs, for every family that computes them.

    python -m tests.gpu.random.random_problems 2000 --seed 1

draws so many problems, compiles their kernels on all cores, holds each against the reference on the GPU and
says what was wrong. One kernel computes many problems, since lengths, heads and batch are not in it.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from benchmarks.sanitizer.points import FUNCTIONS
from benchmarks.saved import save
from flashtune.core.config import Config
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.text import parse_functions
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import (
    MASK_BLOCKS,
    PAGE_SIZES,
    Bias,
    BlockLists,
    Causal,
    Direction,
    Dtype,
    Feature,
    KvDtype,
    KvScale,
    Problem,
)
from flashtune.core.target import Target, device_target
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.verification.cases import Case
from tests.gpu.random.random_cases import random_case

WIDTHS = ((64, 64), (128, 128), (96, 96), (40, 24), (256, 256), (192, 128), (16, 32))
LATENT_WIDTHS = ((576, 512), (96, 64), (80, 64))
DTYPES = (Dtype.BF16,) * 6 + (Dtype.FP16,) * 3 + (Dtype.FP32,)
# Draws of a problem and of a config until a family takes one.
DRAWS = 96
# An 8-bit cache in pages. It counts as one feature in the pairs.
STORED_PAGES = frozenset({Feature.PAGES, Feature.QUANTIZED_KV})
# Bytes that the compiler may use in addition to those that the SRAM model counts.
SPARE_BYTES = 1024


class Subject(NamedTuple):
    """A kernel, and its problem except for lengths, heads and batch."""

    family: str
    problem: Problem
    config: Config
    specialization: Specialization


class Trial(NamedTuple):
    """A random problem for a kernel."""

    subject: Subject
    case: Case


def feature_sets() -> tuple[frozenset[Feature], ...]:
    """No feature, each by itself, and every pair.

    An 8-bit cache in pages counts as one feature. Each set with pages is also drawn with packed queries.
    """
    singles = [frozenset({feature}) for feature in DRAWN]
    pairs = [frozenset(pair) for pair in itertools.combinations(DRAWN, 2)]
    pairs += [STORED_PAGES | single for single in singles]
    packed = [pair | {Feature.PACKED} for pair in pairs if Feature.PAGES in pair]
    return tuple(dict.fromkeys((frozenset(), *singles, *pairs, *packed)))


def subjects(seed: int, target: Target) -> Iterator[Subject]:
    """One kernel for each set of features and each family that computes it."""
    chance = random.Random(seed)
    own = [family for family in families() if family.direction is Direction.FORWARD]
    for asked, family in itertools.product(feature_sets(), own):
        subject = draw_subject(asked, family, chance, target)
        if subject is not None:
            yield subject


def trials(count: int, seed: int, target: Target, most: int | None = None) -> Iterator[Trial]:
    """So many random problems, given to all subjects in a random order; the same ones for the same seed.

    `most` is the largest number of kernels, if not all shall be compiled.
    """
    kernels = list(subjects(seed, target))
    chance = random.Random(f"{seed} cases")
    chance.shuffle(kernels)
    for subject in itertools.islice(itertools.cycle(kernels[:most]), count):
        yield Trial(subject, case_of(subject, chance, target))


def case_of(subject: Subject, chance: random.Random, target: Target) -> Case:
    """A random case that the subject's family supports."""
    family = find_family(subject.family)
    while True:
        case = random_case(chance, subject.problem, subject.config)
        if unsupported_reason(family, case.problem, target, subject.specialization) is None:
            return case


def draw_subject(
    asked: frozenset[Feature], family: Family, chance: random.Random, target: Target
) -> Subject | None:
    """A kernel of a family for a problem with these features; None where no draw is one that it computes."""
    for _ in range(DRAWS):
        problem = _problem(asked, chance)
        if problem is None or problem.features != asked:
            continue
        if family.direction is Direction.BACKWARD:
            problem = msgspec.structs.replace(problem, direction=family.direction, seqlen_q=1024)
        specialization = Specialization(
            chance.choice((Alignment.SIXTEEN, Alignment.SIXTEEN, Alignment.EIGHT, Alignment.ANY)),
            chance.choice((32, 32, 64)),
            chance.random() < 0.8,
        )
        if problem.is_backward and problem.bias is Bias.ADDITIVE and chance.random() < 0.5:
            specialization = msgspec.structs.replace(specialization, constant_bias=True)
        if unsupported_reason(family, problem, target, specialization) is None:
            config = _config(family, problem, chance, target, specialization)
            return Subject(family.name, problem, config, specialization)
    return None


def _config(
    family: Family, problem: Problem, chance: random.Random, target: Target, specialization: Specialization
) -> Config:
    """A point of the space that fits; the default half of the time, and where no draw fits."""
    space = family.space(problem, target)
    for _ in range(DRAWS if chance.random() < 0.5 else 0):
        config = space.choose(lambda axis: chance.choice(axis.values))
        items = family.sram_items(problem, config, target, specialization)
        if space.admits(config) and sum(i.bytes for i in items) + SPARE_BYTES <= target.sram_per_block:
            return config
    return family.default(problem, target)


def _problem(asked: frozenset[Feature], chance: random.Random) -> Problem | None:
    head_dim, value_head_dim = chance.choice(LATENT_WIDTHS if Feature.MLA in asked else WIDTHS)
    fields: dict[str, Any] = {
        "dtype": chance.choice(DTYPES),
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "heads": 16 if Feature.MLA in asked else 8,
        "kv_heads": 1 if Feature.MLA in asked else 2,
        "batch": 2,
        # Short enough for decoding: no kernel depends on it.
        "seqlen_q": 1,
        "seqlen_kv": 1024,
        "causal": chance.choice(tuple(Causal)),
    }
    for feature in sorted(asked, key=lambda feature: feature.name):
        fields |= DRAWN[feature](chance, fields)
    try:
        return Problem(**fields)
    except ProblemError:
        return None


def _window(chance: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    left = chance.choice((0, 1, 7, 16, 63, 100, 128, 255, 300))
    right = chance.choice((0, 1, 5, 17, 64, 100))
    if fields["causal"] is not Causal.NONE or chance.random() < 0.3:
        return {"window_left": left}
    return {"window_right": right} if chance.random() < 0.3 else {"window_left": left, "window_right": right}


def _stored(chance: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    del fields
    return {"kv_dtype": chance.choice(tuple(KvDtype)), "kv_scale": chance.choice(tuple(KvScale))}


Draw = Callable[[random.Random, dict[str, Any]], dict[str, Any]]
DRAWN: dict[Feature, Draw] = {
    Feature.WINDOW: _window,
    Feature.SINK_TOKENS: lambda chance, _: {"sink_tokens": chance.choice((1, 4, 5, 16, 64, 70))},
    Feature.CHUNK: lambda chance, _: {"chunk": chance.choice((16, 50, 64, 128, 200, 256))},
    Feature.PREFIX: lambda *_: {"prefix": True},
    Feature.BLOCK_MASK: lambda chance, _: {
        "block_mask": chance.choice(MASK_BLOCKS),
        "block_lists": chance.choice(tuple(BlockLists)),
    },
    Feature.FUNCTIONS: lambda chance, _: {
        "functions": parse_functions(chance.choice(FUNCTIONS)),
        "causal": Causal.NONE,
    },
    Feature.SOFTCAP: lambda *_: {"softcap": True},
    Feature.ALIBI: lambda *_: {"alibi": True},
    Feature.BIAS: lambda chance, _: {"bias": chance.choice((Bias.ADDITIVE, Bias.BOOLEAN))},
    Feature.SINKS: lambda *_: {"sinks": True},
    Feature.PACKED: lambda *_: {"packed": 2},
    Feature.KV_LENGTHS: lambda *_: {"kv_lengths": True},
    Feature.PAGES: lambda chance, _: {"page_size": chance.choice(PAGE_SIZES)},
    Feature.TREE: lambda *_: {"tree": True},
    Feature.QUANTIZED_KV: _stored,
    Feature.MLA: lambda *_: {"mla": True},
    Feature.DROPOUT: lambda *_: {"dropout": True},
}


def run(trials: Callable[..., Iterator[Trial]], description: str | None, count: int) -> int:
    """Draws, compiles and checks problems by the options of the command line, and prints the errors.

    Returns 1 if a result is wrong, or if a backward kernel's self-check refuses it.
    """
    from tests.gpu.random.random_checks import check_all

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=count)
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
    is_backward = any(trial.subject.problem.is_backward for trial in drawn)
    return 1 if summary.wrong or (is_backward and summary.refused) else 0


if __name__ == "__main__":
    sys.exit(run(trials, __doc__, 2000))
