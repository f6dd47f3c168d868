"""Tabular benchmarks with constructed times, for tests of searches."""

import random
from typing import Any

from benchmarks.exhaustive.truth_table import Row, Sampled, TruthTable, draw, rounded, values_of
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome, Resources, Versions
from flashtune.core.target import find_target
from flashtune.tuner.candidates import SearchTask, contiguous_specialization, open_spaces
from flashtune.tuner.workloads.shapes import parse_shape

SHAPE = "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal"
VERSIONS = Versions("0.1.0", "template", "2.11.0", "3.6.0", "12.8", "580")


def a_problem(shape: str = SHAPE) -> Problem:
    (problem,) = parse_shape(shape)
    return problem


def a_table(
    shape: str = SHAPE, family: str = "forward_hopper", configs: int = 60, seed: int = 0, **changes: Any
) -> TruthTable:
    """Each value of each axis costs something of its own, and pairs of some axes a little more.

    One config in twelve is wrong, one is refused by the compiler, as in spaces that were measured.
    """
    problem, target = a_problem(shape), find_target("h200")
    spaces = open_spaces(problem, target, (family,))
    scope = SearchTask(problem, target, contiguous_specialization(problem), spaces)
    fitting, drawn = draw(scope, configs, seed)
    costs = random.Random(seed)
    share = {
        (axis.name, value): costs.uniform(0.0, 0.2) for axis in spaces[0].space.axes for value in axis.values
    }
    rows = []
    for number, candidate in enumerate(drawn):
        values = values_of(candidate.config)
        ms = 1.0
        for name, value in candidate.config.items():
            ms *= 1.0 + share.get((name, value), 0.0)
        resources = Resources(100_000, registers=168, compile_seconds=costs.uniform(1.0, 4.0))
        if number % 12 == 11:
            row = Row(values, Outcome.COMPILE_ERROR, "PassManager::run failed")
        elif number % 12 == 7:
            row = Row(values, Outcome.WRONG_RESULT, "random q=65: row errors", resources)
        else:
            first = Sampled(rounded(ms), rounded(0.995 * ms), rounded(1.005 * ms), 9)
            row = Row(values, Outcome.OK, "", resources, first=first)
        rows.append(row)
    fields: dict[str, Any] = {
        "problem": problem,
        "target": target.name,
        "family": family,
        "versions": VERSIONS,
        "space": spaces[0].space.size(),
        "fitting": fitting,
        "drawn": len(drawn),
        "seed": seed,
        "seconds": 1.0,
        "jobs": 15,
        "anchors": (1.0,),
        "peers": (),
        "fields": spaces[0].family.config_type.__struct_fields__,
        "rows": tuple(rows),
    }
    return TruthTable(**(fields | changes))
