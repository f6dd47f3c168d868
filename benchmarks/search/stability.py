"""How often repeated searches select different configs, and the resulting loss.

    python -m benchmarks.search.stability --save stability.json  # six shapes, three searches each
    python -m benchmarks.search.stability --shape heads=16,seqlen=512,head_dim=128,tokens=16384 --searches 1

Each search has an empty database, its own seed, the default budget, and warm starts from the shipped table's
other shapes. Searches share binaries, so later ones hardly wait for the compiler. The finalists of the first
search are then timed again, twice with half a search's samples. Each half has a winner, which a table made
from it would hold. Finally all winners of a shape are timed in one interleaved run with the shipped config,
the winner of much longer searches. Each is compared with the fastest. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target
from flashtune.db.store import open_store
from flashtune.db.table import shipped_table
from flashtune.tuner.candidates import SearchTask, contiguous_specialization, open_spaces
from flashtune.tuner.execution.backend import SearchWorkers, open_workers
from flashtune.tuner.execution.timed_runs import run_finals
from flashtune.tuner.perf_model.prediction import shipped_fit
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.finals import FINALISTS, FINALS_WITHIN
from flashtune.tuner.search.ranking import promising
from flashtune.tuner.search.request import Budget, SearchRequest, WarmStart
from flashtune.tuner.search.selection import candidate_of, finalists, select
from flashtune.tuner.search.warm_start import warm_configs
from flashtune.tuner.workloads.shapes import parse_shape

SHAPES = (
    "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal",
    "heads=32,seqlen=1024,head_dim=64,tokens=16384",
    "heads=8,seqlen=4096,head_dim=256,tokens=16384",
    "heads=16,seqlen=512,head_dim=128,tokens=16384",
    "heads=32,seqlen=8192,head_dim=64,tokens=16384,causal",
    "heads=16,seqlen=16384,head_dim=128,tokens=16384",
)
SEARCHES = 3
HALF_ROUNDS = 11
JUDGING_ROUNDS = 61


class Stability(msgspec.Struct, frozen=True):
    """One shape.

    Attributes:
        problem: The problem's key.
        picks: Number of the config that each search chose; equal numbers are the same config.
        halves: Number of the config that each half of the samples chose.
        shipped: Number of the config that the shipped table has for the problem; None where it has none.
        ms: Time of each config that has a number, all timed in turn.
        seconds: Wall clock of each search.
    """

    problem: str
    picks: tuple[int, ...]
    halves: tuple[int, ...]
    shipped: int | None
    ms: tuple[float, ...]
    seconds: tuple[float, ...]

    def cost(self, numbers: Sequence[int]) -> float:
        """The loss of the slowest of some selections against the fastest, as a share."""
        times = [self.ms[number] for number in numbers]
        return max(times) / min(times) - 1

    @property
    def share(self) -> float | None:
        """Speed of the first search's pick over the shipped config's; None where none ships."""
        return None if self.shipped is None else self.ms[self.shipped] / self.ms[self.picks[0]]


def stability(
    problem: Problem,
    target: Target,
    device: torch.device,
    equipment: SearchWorkers,
    budget: Budget,
    searches: int,
) -> Stability:
    """Searches a shape several times and compares the selections.

    Raises:
        FlashtuneError: A search selected nothing, or the GPU is lost.
    """
    specialization = contiguous_specialization(problem)
    scope = promising(
        SearchTask(problem, target, specialization, open_spaces(problem, target, ())), shipped_fit()
    )
    table = shipped_table(target.name)
    records = () if table is None else table.records
    others = [record for record in records if record.problem != problem]
    runs = [_searched(scope, others, seed, equipment, budget) for seed in range(searches)]
    first = finalists(runs[0][1], FINALISTS, FINALS_WITHIN)
    halves = [_selected_again(first, scope, device) for _ in range(2)]
    shipped = select(record for record in records if record.problem == problem)
    known = [] if shipped is None else [shipped]
    chosen = [candidate_of(record) for record in (*(best for best, _, _ in runs), *halves, *known)]
    distinct = tuple(dict.fromkeys(chosen))
    times = run_finals(problem, distinct, specialization, target, device, rounds=JUDGING_ROUNDS)
    numbers = [distinct.index(candidate) for candidate in chosen]
    return Stability(
        problem=problem.key,
        picks=tuple(numbers[:searches]),
        halves=tuple(numbers[searches : searches + 2]),
        shipped=numbers[-1] if known else None,
        ms=tuple(round(measurement.ms, 5) for measurement in times),
        seconds=tuple(round(seconds, 1) for _, _, seconds in runs),
    )


def _searched(
    scope: SearchTask, others: Sequence[Record], seed: int, equipment: SearchWorkers, budget: Budget
) -> tuple[Record, list[Record], float]:
    """The selection of a search that knows other shapes' winners, its trials, and its wall clock."""
    request = SearchRequest(
        problem=scope.problem,
        target=scope.target,
        device=0,
        budget=budget,
        seed=seed,
        experience=WarmStart(warm_configs(others, scope), shipped_fit()),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(str(Path(folder, "records.sqlite"))) as store,
    ):
        result = run_search(request, store, equipment=equipment)
        records = [entry.record for entry in store.records(scope.problem)]
    if result.best is None:
        raise FlashtuneError(f"a search of {scope.problem.key} found nothing that works")
    return result.best, records, result.seconds


def _selected_again(records: Sequence[Record], scope: SearchTask, device: torch.device) -> Record:
    """The selection among finalists after another timing, with fewer samples."""
    unique = {candidate_of(record): record for record in records}
    measured = run_finals(
        scope.problem, tuple(unique), scope.specialization, scope.target, device, rounds=HALF_ROUNDS
    )
    timed = [
        msgspec.structs.replace(record, measurement=measurement)
        for record, measurement in zip(unique.values(), measured, strict=True)
    ]
    selected = select(timed)
    assert selected is not None
    return selected


def _lines(found: Sequence[Stability]) -> Iterator[str]:
    yield "| problem | picks of the searches | cost | of the halves | cost | over the shipped | seconds |"
    yield "| --- | --- | ---: | --- | ---: | ---: | --- |"
    for entry in found:
        picks, halves = (
            " ".join(chr(ord("A") + one) for one in some) for some in (entry.picks, entry.halves)
        )
        share = "" if entry.share is None else f"{entry.share:.3f}"
        yield (
            f"| {entry.problem} | {picks} | {entry.cost(entry.picks):.2%} "
            f"| {halves} | {entry.cost((entry.picks[0], *entry.halves)):.2%} "
            f"| {share} | {', '.join(f'{seconds:.0f}' for seconds in entry.seconds)} |"
        )
    changed = sum(len(set(entry.picks)) > 1 for entry in found)
    worst = max(entry.cost(entry.picks) for entry in found)
    yield ""
    yield f"The pick changed on {changed} of {len(found)} shapes; the worst change costs {worst:.2%}."


def main() -> None:
    """Searches the shapes of the command line again and again."""
    parser = argparse.ArgumentParser(description="How often repeated searches pick differently.")
    parser.add_argument("--shape", action="append", help="as for flashtune search; repeatable")
    parser.add_argument("--trials", type=int, help="the budget of each search; a search's own if left out")
    parser.add_argument("--searches", type=int, default=SEARCHES, help="of each shape")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures, in JSON")
    options = parser.parse_args()
    found: list[Stability] = []
    try:
        target, device = device_target(0), torch.device("cuda", 0)
        budget = Budget(options.trials, None, None) if options.trials else Budget()
        problems = [problem for shape in options.shape or SHAPES for problem in parse_shape(shape)]
        with open_workers(0) as equipment:
            for problem in problems:
                found.append(stability(problem, target, device, equipment, budget, options.searches))
                print(found[-1], flush=True)
                if options.save is not None:
                    options.save.write_bytes(msgspec.json.encode(found))
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print("\n".join(_lines(found)))


if __name__ == "__main__":
    main()
