"""Simulated searches with several strategies, and their regret."""

import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.exhaustive.fitting import fit_tables
from benchmarks.exhaustive.truth_table import TruthTable, fastest
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.replay import Replay, best_after, replay_scope, target_of
from flashtune.db.store import open_store
from flashtune.db.table import shipped_table
from flashtune.tuner.candidates import Candidate, FamilySpace
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.finals import FINALISTS
from flashtune.tuner.search.request import Budget, SearchRequest, WarmStart
from flashtune.tuner.search.surrogate import CandidateGrid
from flashtune.tuner.search.warm_start import warm_configs

# Cores of the simulated machine that compile, as the machine that made the tables had.
JOBS = 15
# Share of a table that a replay tries, at most.
TRIED_SHARE = 0.5
# Trials of Optuna's Gaussian process take a tenth of a second and more, the later ones longer.
MAX_TRIALS = {"gp": 45}
# Criteria of a search: its answer after this share of a space, and its trials until it is so near.
JUDGED_SHARE = 0.15
NEAR = 0.98


class Run(msgspec.Struct, frozen=True):
    """One simulated search."""

    policy: str  # The strategy.
    seed: int  # The random seed.
    shares: tuple[float, ...]  # The result as a share of the true best, after each trial.
    seconds: tuple[float, ...]  # Simulated seconds until each trial was over.


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


def replayed(
    table: TruthTable, experience: WarmStart, policy: str, seed: int, empty: Path, share: float = TRIED_SHARE
) -> Run:
    """Simulates one search.

    Args:
        table: The truth.
        experience: The warm start.
        policy: The strategy.
        seed: The random seed.
        empty: An empty database; the search uses a copy.
        share: The share of the table that is tried.
    """
    scope = replay_scope(table)
    replay = Replay(table, JOBS, seed)
    trials = math.ceil(share * len(table.rows))
    request = SearchRequest(
        problem=table.problem,
        target=target_of(table),
        device=0,
        budget=Budget(min(trials, MAX_TRIALS.get(policy, trials)), None, None),
        seed=seed,
        spaces=((table.family, scope.spaces[0].space),),
        experience=experience,
    )
    with tempfile.TemporaryDirectory() as folder:
        database = shutil.copy(empty, Path(folder, "records.sqlite"))
        with open_store(str(database)) as store:
            run_search(request, store, equipment=replay.equipment(), policy=POLICIES[policy])
    best = fastest(table)
    shares = tuple(round(best / ms, 5) for ms in best_after(replay.tried, FINALISTS))
    return Run(policy, seed, shares, tuple(round(entry.seconds, 2) for entry in replay.tried))


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of one strategy on one table, over all seeds."""

    policy: str  # The strategy.
    problem: str  # The problem's key.
    family: str  # The searched family.
    candidates: int  # Number of candidates.
    median: tuple[float, ...]  # Median share of the true best after each trial.
    worst: tuple[float, ...]  # The worst seed's.
    # Median share of the true best after each simulated second, from the first on.
    by_second: tuple[float, ...]
    worst_by_second: tuple[float, ...]  # The worst seed's.
    # Share of the true best with the judged share of the space tried, for each seed.
    judged: tuple[float, ...]
    # Trials until the answer was near the best, for each seed; None where it never was.
    trials: tuple[int | None, ...]


def summarize(table: TruthTable, runs: Sequence[Run]) -> Summary:
    """One policy's runs on one table, over their seeds."""
    length = min(len(run.shares) for run in runs)
    columns = [[run.shares[trial] for run in runs] for trial in range(length)]
    judged_after = min(length, math.ceil(JUDGED_SHARE * len(table.rows)))
    last = int(max(run.seconds[length - 1] for run in runs))
    moments = [[_share_at(run, second) for run in runs] for second in range(1, last + 1)]
    return Summary(
        policy=runs[0].policy,
        problem=table.problem.key,
        family=table.family,
        candidates=len(table.rows),
        median=tuple(round(statistics.median(column), 4) for column in columns),
        worst=tuple(round(min(column), 4) for column in columns),
        by_second=tuple(round(statistics.median(moment), 4) for moment in moments),
        worst_by_second=tuple(round(min(moment), 4) for moment in moments),
        judged=tuple(run.shares[judged_after - 1] for run in runs),
        trials=tuple(_first_near(run) for run in runs),
    )


def _share_at(run: Run, second: int) -> float:
    done = sum(moment <= second for moment in run.seconds)
    return run.shares[done - 1] if done else 0.0


def _first_near(run: Run) -> int | None:
    return next((trial for trial, share in enumerate(run.shares, 1) if share >= NEAR), None)
