"""Compares search strategies on tabular benchmarks: regret, and number of trials.

    python -m benchmarks.search_replay.policies --save policies.json  # all policies, all tables: minutes
    python -m benchmarks.search_replay.policies --policy default --policy random --seeds 5

No GPU is needed: the search's own driver runs on tests/data/truth with a simulated clock. The default
strategy knows the winners of the shipped table except those of the current problem. Its calibration of
predictions is fitted to the other tables. `cold` is the same strategy without either, simulated only up to
the judged budget. Optuna's Gaussian process needs scipy. `benchmarks.search_replay.policies_report` makes
tables and charts of saved results.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.exhaustive.fitting import NOTHING
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.replays import (
    JUDGED_SHARE,
    Run,
    Summary,
    experience_without,
    replayed,
    summarize,
)
from flashtune.core.errors import FlashtuneError
from flashtune.db.store import open_store
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.search.request import WarmStart

TABLES = Path("tests/data/truth")
SEEDS = 20
# The default policy without measurements of other problems.
COLD = "cold"


def main() -> None:
    """Simulates the searches of the command line."""
    options = _options()
    try:
        tables = read_tables(options.tables)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    if not tables:
        sys.exit(
            f"error: {options.tables} has no tabular benchmarks: make some with benchmarks.exhaustive.truth"
        )
    results = summaries(tables, tuple(options.policy or (*POLICIES, COLD)), options.seeds, options.jobs)
    if options.save is not None:
        options.save.write_bytes(msgspec.json.encode(results))


def summaries(
    tables: Sequence[TruthTable], policies: Sequence[str], seeds: int, workers: int
) -> list[Summary]:
    """Simulates every strategy on every table with every seed; prints each result."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.sqlite")
        open_store(str(empty)).close()
        # Each replay has a core to itself. torch and numpy read this when a worker imports them; with more
        # threads numpy's linear algebra takes several times the CPU time.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        with context.Pool(workers) as pool:
            for table in tables:
                experience = experience_without(table, tables)
                for policy in policies:
                    wanted = [(table, experience, policy, seed, empty) for seed in range(seeds)]
                    results.append(summarize(table, pool.starmap(run, wanted)))
                    print(_line(results[-1]), flush=True)
    return results


def run(table: TruthTable, experience: WarmStart, policy: str, seed: int, empty: Path) -> Run:
    """One search by a policy of `POLICIES`, or by the default one without experience (`COLD`)."""
    if policy != COLD:
        return replayed(table, experience, policy, seed, empty)
    result = replayed(table, WarmStart((), NOTHING), "default", seed, empty, JUDGED_SHARE)
    return msgspec.structs.replace(result, policy=COLD)


def _line(summary: Summary) -> str:
    judged = sorted(summary.judged)
    reached = [trials for trials in summary.trials if trials is not None]
    near = f"{sum(reached) / len(reached):.1f} trials to 0.98" if reached else "0.98 never reached"
    return (
        f"{summary.family} {summary.problem} {summary.policy}: {judged[len(judged) // 2]:.3f} with "
        f"{JUDGED_SHARE:.0%} tried, worst {judged[0]:.3f}; {near} by {len(reached)} of {len(judged)}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares policies of searching on truth tables.")
    parser.add_argument(
        "--policy", action="append", choices=sorted((*POLICIES, COLD)), help="repeatable; all if left out"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="searches of each policy on each table")
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of truth tables")
    parser.add_argument("--jobs", type=int, default=available_cpus(), help="replays at once")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the curves, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
