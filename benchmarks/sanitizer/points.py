"""The list of kernels and problems for a sanitizer, equal in every process.

It has the kernels of the shipped table, and points of each family's space with random features. Other checks
of all families draw these points too. Problems are those of verification: small, ragged, with sequences
without keys.
"""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from flashtune.core.errors import ProblemError
from flashtune.core.expressions.text import parse_functions
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import (
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
from flashtune.core.target import Target
from flashtune.db.table import shipped_table
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask, demand
from flashtune.tuner.sram_audit.points import MAX_UNROLLED, Point, unrolled
from flashtune.verification import cases as forward_cases
from flashtune.verification.cases import Case, Level, tile_of
from flashtune.verification.gradients import cases as gradient_cases
from flashtune.verification.probes import Probe

WIDTHS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 256)
LATENT_WIDTHS = ((576, 512), (96, 64), (80, 64), (192, 128), (272, 256))
DTYPES = (Dtype.BF16,) * 5 + (Dtype.FP16,) * 3 + (Dtype.FP32, Dtype.E4M3)
# Queries of a sequence: kernels do not depend on it, but spaces do, and decoding takes few.
QUERIES = (1, 2, 16, 1024)
KEYS = 4096
# Of this many points, one has values of another head dim than its queries.
EVERY_UNLIKE = 4
# How many features a point has, one of the three as likely as another.
FEATURES = (0, 1, 1, 2)
# A gradient has this many products, all unrolled where no matrix unit computes them.
PRODUCTS = 5
# A family that supports none of this many draws supports none on the target.
DRAWS = 2000
# Tiles for every multiprocessor more than once, so that persistent programs go from tile to tile.
ROUNDS_OF_TILES = 1.2
FEW_TILES = 64
# Inputs and outputs of a problem: they are made on the CPU.
MAX_BYTES = 2**27

# A document mask with a window, and a relative bias with a cap.
FUNCTIONS = (
    "key.query.subtract/1/0.int_number.less/2/3.load/0.load/1.equal/5/6.and/4/7:-1:8:int32x1",
    (
        "score.head.query.key.subtract/2/3.int@-64.maximum/4/5.int@64.minimum/6/7.add/8/7.load/1/9.add/0/10"
        ".float_number.divide/11/12.tanh/13.multiply/12/14:15:-1:fp32x2"
    ),
)

ASKED: dict[Feature, tuple[dict[str, Any], ...]] = {
    Feature.WINDOW: (
        {"window_left": 100},
        {"window_left": 0},
        {"window_left": 128, "window_right": 17},
        {"window_right": 64},
    ),
    Feature.SINK_TOKENS: ({"window_left": 100, "sink_tokens": 5}, {"chunk": 200, "sink_tokens": 64}),
    Feature.CHUNK: ({"chunk": 50}, {"chunk": 256}),
    Feature.PREFIX: ({"prefix": True},),
    Feature.BLOCK_MASK: (
        {"block_mask": 64},
        {"block_mask": 128},
        {"block_mask": 64, "block_lists": BlockLists.GROUP},
    ),
    Feature.FUNCTIONS: tuple(
        {"functions": parse_functions(text), "causal": Causal.NONE} for text in FUNCTIONS
    ),
    Feature.SOFTCAP: ({"softcap": True},),
    Feature.ALIBI: ({"alibi": True},),
    Feature.BIAS: ({"bias": Bias.ADDITIVE}, {"bias": Bias.BOOLEAN}),
    Feature.SINKS: ({"sinks": True},),
    Feature.PACKED: ({"packed": 2},),
    Feature.KV_LENGTHS: ({"kv_lengths": True},),
    Feature.PAGES: tuple({"page_size": size} for size in PAGE_SIZES),
    Feature.TREE: ({"tree": True}, {"tree": True, "page_size": 16}),
    Feature.QUANTIZED_KV: tuple(
        {"kv_dtype": dtype, "kv_scale": scale} for dtype in KvDtype for scale in KvScale
    ),
    Feature.MLA: ({"mla": True},),
    Feature.DROPOUT: ({"dropout": True},),
    Feature.DETERMINISTIC: ({"deterministic": True},),
    Feature.BATCH_INVARIANT: ({"batch_invariant": True},),
}


@functools.lru_cache(maxsize=1024)
def _rendered(computation: Problem, candidate: Candidate, specialization: Specialization) -> Kernel:
    return render(find_family(candidate.family), computation, candidate.config, specialization)


class Subject(msgspec.Struct, frozen=True):
    """One kernel to run."""

    problem: Problem  # The problem, of any size.
    candidate: Candidate  # The config.
    specialization: Specialization  # The kernel's assumptions about its tensors.
    shipped: bool  # Whether it is a kernel of a shipped table.

    @property
    def kernel(self) -> Kernel:
        """The rendered kernel."""
        return _rendered(self.problem.computation, self.candidate, self.specialization)

    @property
    def digest(self) -> str:
        """The kernel's digest."""
        return self.kernel.digest

    @property
    def label(self) -> str:
        """A description of the kernel."""
        assumed = self.specialization
        lse = ", lse" if assumed.lse else ""
        strides = f"strides of {int(assumed.alignment)}, {assumed.index_bits} bits{lse}"
        return f"{self.problem.key} {self.candidate.family} {self.candidate.config.label()} ({strides})"


def subjects(target: Target, samples: int, seed: int) -> tuple[Subject, ...]:
    """Returns shipped kernels and drawn ones, each once, with families in turn.

    `samples` points of each family are drawn with a seed. Some of them do not compile.
    """
    groups: dict[tuple[bool, str], list[Subject]] = {}
    seen: set[str] = set()
    points = (itertools.islice(drawn(family, target, seed), samples) for family in families())
    for subject in itertools.chain(_shipped(target), *points):
        if subject.digest not in seen:
            seen.add(subject.digest)
            groups.setdefault((subject.shipped, subject.candidate.family), []).append(subject)
    turns = itertools.zip_longest(*groups.values())
    return tuple(subject for turn in turns for subject in turn if subject is not None)


def _shipped(target: Target) -> Iterator[Subject]:
    table = shipped_table(target.name)
    for record in table.records if table else ():
        if record.config is not None:
            candidate = Candidate(record.family, record.config)
            yield Subject(record.problem, candidate, record.specialization, shipped=True)


def drawn(family: Family, target: Target, seed: int) -> Iterator[Subject]:
    """Yields endless points, the same for the same seed, or none if no draw is supported on the target."""
    chance = random.Random(f"{seed} {family.name} {target.name}")  # noqa: S311 - no secret
    draws = (_draw(family, target, chance) for _ in itertools.repeat(None))
    while True:
        subject = next(filter(None, itertools.islice(draws, DRAWS)), None)
        if subject is None:
            return
        yield subject


def _draw(family: Family, target: Target, chance: random.Random) -> Subject | None:
    """Returns a point, or None if the family does not support the draw, or it does not fit."""
    problem = _problem(family, chance)
    assumed = Specialization(chance.choice(tuple(Alignment)), chance.choice((32, 64)), chance.random() < 0.5)
    if problem is None or unsupported_reason(family, problem, target, assumed) is not None:
        return None
    space = family.space(problem, target)
    config = space.choose(lambda axis: chance.choice(axis.values))
    candidate = Candidate(family.name, config)
    most = MAX_UNROLLED // PRODUCTS if problem.is_backward else MAX_UNROLLED
    if not space.contains(config) or unrolled(Point(problem, candidate, assumed), target) > most:
        return None
    if demand(SearchTask(problem, target, assumed, ()), candidate).excess:
        return None
    return Subject(problem, candidate, assumed, shipped=False)


def _problem(family: Family, chance: random.Random) -> Problem | None:
    supported = sorted(family.features)
    asked = chance.sample(supported, min(len(supported), chance.choice(FEATURES)))
    latent = Feature.MLA in asked
    width = chance.choice(WIDTHS)
    widths = (width, width if chance.randrange(EVERY_UNLIKE) else chance.choice(WIDTHS))
    head_dim, value_head_dim = chance.choice(LATENT_WIDTHS) if latent else widths
    fields: dict[str, Any] = {
        "direction": family.direction,
        "dtype": chance.choice(DTYPES),
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "heads": 16 if latent else 8,
        "kv_heads": 1 if latent else 2,
        "batch": 2,
        "seqlen_q": 1024 if family.direction is Direction.BACKWARD else chance.choice(QUERIES),
        "seqlen_kv": KEYS,
        "causal": chance.choice(tuple(Causal)),
    }
    for feature in asked:
        fields |= chance.choice(ASKED[feature])
    try:
        return Problem(**fields)
    except ProblemError:
        # Some features exclude each other, such as lengths and pages, which have lengths.
        return None


def cases_of(subject: Subject, target: Target, *, busy: bool) -> tuple[Case, ...]:
    """Returns one or two problems of a kernel's verification.

    With `busy`, they fill the GPU more than once, so that persistent programs take several tiles.
    """
    family = find_family(subject.candidate.family)
    own = gradient_cases if subject.problem.is_backward else forward_cases
    cases = [
        case
        for case in own.companions(subject.problem, subject.candidate.config, Level.QUICK, reduced=False)
        if unsupported_reason(family, case.problem, target, subject.specialization) is None
        and case.problem.minimal_bytes() <= MAX_BYTES
    ]
    rows = tile_of(subject.candidate.config)[0]
    ragged = _ragged(cases, rows)
    first = _busy(cases, rows, target) if busy else ragged
    at_edges = [case for case in cases if case.probe is Probe.EDGE]
    # Windows and chunks hide keys only if there are more keys than they show.
    second = max(at_edges, key=lambda case: case.problem.seqlen_kv, default=ragged)
    return tuple(dict.fromkeys((first, second)))


def _tiles(case: Case, rows: int) -> int:
    problem = case.problem
    return problem.batch * problem.heads * -(-problem.seqlen_q // rows)


def _busy(cases: Iterable[Case], rows: int, target: Target) -> Case:
    """Returns the case with most keys that fills the GPU more than once, or else that with most tiles."""

    def size(case: Case) -> tuple[float, int]:
        return min(_tiles(case, rows), ROUNDS_OF_TILES * target.sm_count), case.problem.seqlen_kv

    return max(cases, key=size)


def _ragged(cases: Iterable[Case], rows: int) -> Case:
    """Returns a case with few tiles, and partial tiles of queries and keys."""

    def size(case: Case) -> tuple[bool, bool]:
        return _tiles(case, rows) <= FEW_TILES, case.probe is Probe.NEEDLE

    return max(cases, key=size)
