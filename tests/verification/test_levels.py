"""Tests that each level has a problem with three tiles of queries and keys for every kernel."""

import itertools
from collections.abc import Iterator

import msgspec
import pytest

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.table import shipped_table
from flashtune.templates.family import Family
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.verification import passes
from flashtune.verification.cases import Case, Level, lengths_of, splits_of
from flashtune.verification.gradients.cases import tiles_of
from tests.problems.plain_masks import visible

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
LATENT: dict[str, object] = {
    "head_dim": 576,
    "value_head_dim": 512,
    "heads": 128,
    "kv_heads": 1,
    "mla": True,
}
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
    if family.supports(case.problem, H200) is not None:
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
    shipped = shipped_table(H200.name)
    assert shipped is not None
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
    level: Level, reduced: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = find_family(name)
    problem = msgspec.structs.replace(PLAIN, direction=family.direction)
    config = family.default(problem, H200)
    monkeypatch.setattr(passes, "interpreting", lambda: reduced)
    kernel = render(family, problem, config, Specialization())
    planned = {case for case, _ in passes.planned_cases(kernel, problem, config, level, 0)}
    small = companions(problem, config, level, reduced=reduced)
    # An interpreter launches each of them once.
    once = {"repeats": 1} if reduced else {}
    assert planned >= {msgspec.structs.replace(case, **once) for case in small}
    assert any(has_third_tiles(family, config, case) for case in small)
