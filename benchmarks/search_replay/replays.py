"""Simulated searches with several strategies, and their regret."""

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.exhaustive.fitting import fit_tables
from benchmarks.exhaustive.truth_table import TruthTable, fastest
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.replay import Replay, best_after, replay_scope
from flashtune.db.store import open_store
from flashtune.db.table import shipped_table
from flashtune.tuner.candidates import Candidate, FamilySpace
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, WarmStart
from flashtune.tuner.search.surrogate import CandidateGrid
from flashtune.tuner.search.warm_start import warm_configs

# Cores of the simulated machine that compile, as the machine that made the tables had.
JOBS = 15
# The share of a table that a replay tries.
JUDGED_SHARE = 0.15


def experience_without(table: TruthTable, tables: Sequence[TruthTable]) -> WarmStart:
    """The experience of a search: all measurements except those of its problem."""
    others = [other for other in tables if other.problem != table.problem]
    return WarmStart(portfolio(table), fit_tables(others))


def portfolio(table: TruthTable) -> tuple[Candidate, ...]:
    """Winners of other problems, near ones first, each replaced by the nearest measured config.

    Winners of the evaluated problem are left out.
    """
    shipped = shipped_table(table.target)
    winners = [] if shipped is None else [r for r in shipped.records if r.problem != table.problem]
    scope = replay_scope(table)
    family = scope.spaces[0].family
    whole = FamilySpace(family, family.space(table.problem, scope.target))
    everywhere = msgspec.structs.replace(scope, spaces=(whole,))
    pool = CandidateGrid(scope, tuple(scope.candidates()))
    free = np.ones(len(pool.candidates), dtype=bool)
    chosen = []
    for winner in warm_configs(winners, everywhere):
        nearest = pool.nearest(winner, free)
        if nearest is not None:
            free[pool.places[nearest]] = False
            chosen.append(nearest)
    return tuple(chosen)


def replayed(table: TruthTable, experience: WarmStart, policy: str, seed: int, empty: Path) -> float:
    """Simulates a search of the judged share of a table. Returns its result as a share of the true best.

    Args:
        table: The truth.
        experience: The warm start.
        policy: The strategy.
        seed: The random seed.
        empty: An empty database; the search uses a copy.
    """
    scope = replay_scope(table)
    replay = Replay(table, JOBS, seed)
    request = SearchRequest(
        problem=table.problem,
        target=scope.target,
        device=0,
        budget=Budget(math.ceil(JUDGED_SHARE * len(table.rows)), None, None),
        seed=seed,
        spaces=((table.family, scope.spaces[0].space),),
        experience=experience,
    )
    with tempfile.TemporaryDirectory() as folder:
        database = shutil.copy(empty, Path(folder, "records.sqlite"))
        with open_store(str(database)) as store:
            run_search(request, store, equipment=replay.equipment(), policy=POLICIES[policy])
    return fastest(table) / best_after(replay.tried, request.budget.finalists)[-1]
