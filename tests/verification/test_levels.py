"""Tests that each level has a problem with three tiles of queries and keys for every kernel."""

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, Feature, Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.verification import passes
from flashtune.verification.cases import Case, Level, lengths_of, splits_of
from flashtune.verification.gradients.cases import tiles_of
from flashtune.verification.inputs.prepared import prepare
from tests.gpu.random.random_cases import random_case
from tests.gpu.random.random_problems import STORED_PAGES, feature_sets, subjects, trials
from tests.problems.plain_masks import plain_attention, visible
from tests.support.records import shipped_table_of

H200 = find_target("h200")
PLAIN = testing.problem("heads=4,kv_heads=2,seqlen=1024,head_dim=64,dtype=bf16")
# Options that may change the lengths of a check, in addition to the mask's alignment.
ASKED: tuple[dict[str, object], ...] = (
    {},
    {"window_left": 100},
    {"window_left": 5000, "sink_tokens": 4},
    {"chunk": 256},
    {"alibi": True},
    {"bias": Bias.ADDITIVE},
    {"packed": 1024},
    {"kv_lengths": True},
    {"page_size": 16},
    {"deterministic": True},
    {"dropout": True},
)
LATENT: dict[str, object] = {"head_dim": 576, "value_head_dim": 512, "heads": 128, "kv_heads": 1, "mla": True}
SHAPES: tuple[dict[str, object], ...] = ({}, {"seqlen_q": 1}, LATENT)


def problems_of(family: Family) -> Iterator[Problem]:
    """The supported problems of a family among dense, masked, varlen, decoding and MLA ones."""
    for causal, asked, shape in itertools.product(Causal, ASKED, SHAPES):
        changes = {"causal": causal, "direction": family.direction, **asked, **shape}
        problem = msgspec.convert(msgspec.to_builtins(PLAIN) | msgspec.to_builtins(changes), Problem)
        # The first 16 queries, as many as decoding takes, see no third tile of keys from the top left.
        few = not problem.mla and problem.seqlen_q == 1 and problem.causal is Causal.TOP_LEFT
        if family.supports(problem, H200) is None and not few:
            yield problem


def companions(problem: Problem, config: Config, level: Level, *, reduced: bool) -> tuple[Case, ...]:
    cases: tuple[Case, ...] = passes._cases(problem).companions(problem, config, level, reduced=reduced)
    return cases


def has_third_tiles(family: Family, config: Config, case: Case) -> bool:
    """Whether a query of a third tile sees a key of a third tile, in a problem that the family computes."""
    # Plain problems of a check are computed, whether or not a search would select the family.
    if (case.problem.features or splits_of(config)) and family.supports(case.problem, H200) is not None:
        return False
    sides = tiles_of(config, reduced=True)
    rows, keys = sides.queries[-1], sides.keys[-1]
    # Rows of a decoding tile are queries times the heads that share keys.
    shared = case.problem.group_size if splits_of(config) else 1
    lengths = lengths_of(case)
    return any(
        queries * shared > 2 * rows
        and length > 2 * keys
        and bool(visible(case.problem, queries, length)[-(-2 * rows // shared) :, 2 * keys :].any())
        for queries, length in set(zip(lengths.queries, lengths.keys, strict=True))
    )


def uncovered(family: Family, problem: Problem, config: Config) -> list[str]:
    """The levels, on a GPU and in the interpreter, that lack such a problem."""
    return [
        f"{level.value}{', interpreted' if reduced else ''}: {problem.key} {config.label()}"
        for level, reduced in itertools.product(Level, (False, True))
        if not any(
            has_third_tiles(family, config, case)
            for case in reversed(companions(problem, config, level, reduced=reduced))
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_level_reaches_third_tiles_in_default_configs(family: Family) -> None:
    problems = tuple(problems_of(family))
    assert {problem.is_causal for problem in problems} == {False, True}
    missing = [
        tile for problem in problems for tile in uncovered(family, problem, family.default(problem, H200))
    ]
    assert missing == []


def shipped_kernels() -> dict[tuple[str, ...], Record]:
    """A record for each config, mask and set of features of the shipped table."""
    shipped = shipped_table_of(H200.name)
    records: dict[tuple[str, ...], Record] = {}
    for record in shipped.records:
        if record.config is not None:
            problem = record.problem
            kind = (problem.causal, problem.dtype, problem.window_left, problem.chunk)
            features = (str(kind), str(sorted(problem.features)))
            records.setdefault((record.family, record.config.label(), *features), record)
    return records


def test_every_level_reaches_third_tiles_in_shipped_configs() -> None:
    records = shipped_kernels()
    assert len(records) > 50
    missing = []
    for record in records.values():
        assert record.config is not None
        missing += uncovered(find_family(record.family), record.problem, record.config)
    assert missing == []


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", ["forward_q_outer", "backward_split"])
def test_check_uses_the_problems_of_its_level(
    level: Level, reduced: bool, name: str, interpret: Callable[[], None]
) -> None:
    family = find_family(name)
    problem = msgspec.structs.replace(PLAIN, direction=family.direction)
    config = family.default(problem, H200)
    if reduced:
        interpret()
    kernel = render(family, problem, config, Specialization())
    planned = {case for case, _ in passes.planned_cases(kernel, problem, config, level, 0)}
    small = companions(problem, config, level, reduced=reduced)
    # An interpreter launches each of them once.
    once = {"repeats": 1} if reduced else {}
    assert planned >= {msgspec.structs.replace(case, **once) for case in small}
    assert any(has_third_tiles(family, config, case) for case in small)


SUBJECTS = list(subjects(1, H200))


def test_all_supported_features_and_pairs_are_drawn() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS}
    absent = {asked for asked in feature_sets() if asked not in drawn}
    # Pages bring their lengths along, no family lays a bias or a block mask over packed sequences, and none
    # drops weights of latent keys.
    pairs = {("kv_lengths", "pages"), ("bias", "packed"), ("mla", "dropout")}
    pairs |= {("block_mask", other) for other in ("packed", "pages", "mla")}
    # Functions combine with block masks, and in pages with packed queries and 8-bit caches.
    alone = {Feature.FUNCTIONS, Feature.PACKED, Feature.QUANTIZED_KV}
    others = set(Feature) - alone - {Feature.BLOCK_MASK, Feature.PAGES}
    pairs |= {("functions", other) for other in others}
    assert absent == {
        asked
        for asked in feature_sets()
        if any(asked.issuperset(pair) for pair in pairs)
        or (Feature.FUNCTIONS in asked and asked & alone > {Feature.FUNCTIONS} and Feature.PAGES not in asked)
    }
    assert {subject.family for subject in SUBJECTS} >= {"forward_masked", "decode_split_kv", "forward_hopper"}


def test_hopper_kernels_of_8_bit_pages_are_drawn_with_other_features() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS if subject.family == "forward_hopper"}
    others = {"window", "sink_tokens", "chunk", "prefix", "softcap", "alibi", "sinks", "tree"}
    expected = {STORED_PAGES, STORED_PAGES | {Feature.PACKED}}
    expected |= {STORED_PAGES | {Feature(other)} for other in others}
    expected |= {STORED_PAGES | {Feature(other), Feature.PACKED} for other in others}
    assert expected == {features for features in drawn if features >= STORED_PAGES}


@pytest.mark.slow
def test_kernels_are_reused_and_problems_are_supported() -> None:
    drawn = list(trials(3 * len(SUBJECTS), 1, H200))
    assert len({trial.subject for trial in drawn}) == len(SUBJECTS)
    assert drawn[:20] == list(trials(20, 1, H200))
    for subject, case in drawn:
        family = find_family(subject.family)
        assert unsupported_reason(family, case.problem, H200, subject.specialization) is None
        # The same source serves: nothing differs but extents.
        assert case.problem.computation == subject.problem.computation


@pytest.mark.parametrize("seed", range(12))
def test_random_cases_are_prepared_correctly(seed: int) -> None:
    chance = random.Random(seed)
    subject = chance.choice([subject for subject in SUBJECTS if subject.problem.head_dim < 256])
    case = random_case(chance, subject.problem, subject.config)
    while case.problem.batch * case.problem.heads * case.problem.seqlen_q * case.problem.seqlen_kv > 2**19:
        case = random_case(chance, subject.problem, subject.config)
    ready = prepare(case, Specialization().alignment, torch.device("cpu"), seed)
    q, k, v, expected = (tensor.view for tensor in ready.memory[:4])
    out, _ = plain_attention(case.problem, q, k, v, ready.side, case.scale)
    assert out.shape == expected.shape
    assert out.isfinite().all()
