"""Simulates searches of every effort on the truth tables, and prints what each loses and saves.

    python -m benchmarks.search_replay.efforts --seeds 3

Start-up is not simulated: its seconds are taken from the limits of the budgets by `--startup`. Each table is
searched with the winners of near shapes, and without them.
"""

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.exhaustive.truth_table import TruthTable, fastest, read_tables
from benchmarks.search_replay.replay import Replay, replay_scope
from benchmarks.search_replay.replays import JOBS, experience_without
from flashtune.db.store import open_store
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import BUDGETS, Budget, Effort, SearchRequest, SearchResult, WarmStart
from flashtune.tuner.search.selection import candidate_of

TABLES = Path(__file__).parents[2] / "tests" / "data" / "truth"
STARTUP_SECONDS = 3.0


class Answer(msgspec.Struct, frozen=True):
    """The result of one simulated search."""

    problem: str  # The problem's key.
    seed: int
    warm: bool  # Whether winners of near shapes were tried first.
    share: float  # Speed of the selected kernel over the fastest of the table.
    tried: int  # Number of candidates.
    seconds: float  # Simulated seconds, the finals included, start-up not.
    stop: str  # Why the search stopped.


def answered(
    table: TruthTable, experience: WarmStart, budget: Budget, seed: int, empty: Path, startup: float
) -> Answer:
    """Returns the result of one search, whose selected kernel has its time of the table."""
    scope = replay_scope(table)
    replay = Replay(table, JOBS, seed)
    if budget.seconds is not None:
        budget = msgspec.structs.replace(budget, seconds=budget.seconds - startup)
    request = SearchRequest(
        problem=table.problem,
        target=scope.target,
        device=0,
        budget=budget,
        seed=seed,
        spaces=((table.family, scope.spaces[0].space),),
        experience=experience,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(str(shutil.copy(empty, Path(folder, "records.sqlite")))) as store,
    ):
        result = run_search(request, store, equipment=replay.equipment())
    share = fastest(table) / _true_ms(table, result)
    warm, tried = bool(experience.warm), result.counts.tried
    return Answer(table.problem.key, seed, warm, share, tried, result.seconds, result.stop.value)


def _true_ms(table: TruthTable, result: SearchResult) -> float:
    assert result.best is not None
    chosen = candidate_of(result.best)
    times = zip(table.rows, table.times(), strict=True)
    return next(ms for row, ms in times if ms is not None and table.candidate(row) == chosen)


def report(answers: dict[Effort, list[Answer]]) -> str:
    """Returns a line for each effort: share of the thorough answer, candidates, seconds."""
    lines = ["effort      of thorough: mean, worst   of the table: mean, worst   candidates   seconds"]
    thorough = [answer.share for answer in answers[Effort.THOROUGH]]
    for effort, rows in answers.items():
        shares = [row.share for row in rows]
        ratios = [share / best for share, best in zip(shares, thorough, strict=True)]
        tried, seconds = [row.tried for row in rows], [row.seconds for row in rows]
        lines.append(
            f"{effort:<10}  {_mean(ratios):.4f} {min(ratios):.3f}   {_mean(shares):.4f} {min(shares):.3f}   "
            f"{statistics.median(tried):.0f} (at most {max(tried)})   "
            f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})"
        )
    return "\n".join(lines)


def _mean(shares: Sequence[float]) -> float:
    return math.exp(statistics.mean(map(math.log, shares)))


def main() -> None:
    """Simulates all searches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--startup", type=float, default=STARTUP_SECONDS)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    tables = read_tables(TABLES)
    answers: dict[Effort, list[Answer]] = {effort: [] for effort in Effort}
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.sqlite")
        open_store(str(empty)).close()
        for table in tables:
            whole = experience_without(table, tables)
            for experience in (whole, msgspec.structs.replace(whole, warm=())):
                for seed in range(arguments.seeds):
                    for effort, rows in answers.items():
                        rows.append(
                            answered(table, experience, BUDGETS[effort], seed, empty, arguments.startup)
                        )
    if arguments.save:
        arguments.save.write_bytes(msgspec.json.encode(answers))
    print(report(answers))


if __name__ == "__main__":
    main()
