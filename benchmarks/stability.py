"""How often repeated searches pick differently, and what that costs.

    python benchmarks/stability.py --save stability.json            # four shapes, three searches each
    python benchmarks/stability.py --shape heads=16,seqlen=512,head_dim=128,tokens=16384 --trials 80

Each search has an empty database, a seed of its own, and what the shipped table knows of other shapes;
binaries are shared, so that later searches hardly wait for the compiler. The finalists of the first search
are then timed once more, twice with about half as many samples as a search takes: what is selected by one
half or the other is what a table would hold that was made from it. At last all picks of a shape are timed
in turn, and each is held against the fastest of them. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from flashtune.db.store import open_store
from flashtune.db.table import shipped_table
from flashtune.errors import FlashtuneError
from flashtune.problem import Problem
from flashtune.record import Record
from flashtune.target import Target, device_target
from flashtune.tuner.candidates import Scope, open_spaces
from flashtune.tuner.chosen import contiguous_specialization
from flashtune.tuner.equipment import Equipment, open_equipment
from flashtune.tuner.finals import run_finals
from flashtune.tuner.fitting import shipped_fit
from flashtune.tuner.ranking import promising
from flashtune.tuner.request import Budget, Experience, SearchRequest
from flashtune.tuner.resume import warm_configs
from flashtune.tuner.search import FINALISTS, FINALS_WITHIN, run_search
from flashtune.tuner.selection import candidate_of, finalists, select
from flashtune.tuner.shapes import parse_shape

SHAPES = (
    "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal",
    "heads=32,seqlen=1024,head_dim=64,tokens=16384",
    "heads=8,seqlen=4096,head_dim=256,tokens=16384",
    "heads=16,seqlen=512,head_dim=128,tokens=16384",
)
SEARCHES = 3
TRIALS = 60
HALF_ROUNDS = 11
JUDGING_ROUNDS = 61


class Stability(msgspec.Struct, frozen=True):
    """One shape.

    Attributes:
        problem: The problem's key.
        picks: Number of the config that each search chose; equal numbers are the same config.
        halves: Number of the config that each half of the samples chose.
        ms: Time of each config that was chosen, all timed in turn.
        seconds: Wall clock of each search.
    """

    problem: str
    picks: tuple[int, ...]
    halves: tuple[int, ...]
    ms: tuple[float, ...]
    seconds: tuple[float, ...]

    def cost(self, numbers: Sequence[int]) -> float:
        """What the slowest of some picks costs over the fastest of them, as a share."""
        times = [self.ms[number] for number in numbers]
        return max(times) / min(times) - 1


def stability(
    problem: Problem, target: Target, device: torch.device, equipment: Equipment, trials: int
) -> Stability:
    """Searches a shape several times and compares what was chosen.

    Raises:
        FlashtuneError: A search found nothing, or the GPU is lost.
    """
    specialization = contiguous_specialization(problem)
    scope = promising(Scope(problem, target, specialization, open_spaces(problem, target, ())), shipped_fit())
    runs = [_searched(scope, seed, equipment, trials) for seed in range(SEARCHES)]
    best = [record for record, _, _ in runs]
    first = finalists(runs[0][1], FINALISTS, FINALS_WITHIN)
    halves = [_selected_again(first, scope, device) for _ in range(2)]
    chosen = [candidate_of(record) for record in (*best, *halves)]
    distinct = tuple(dict.fromkeys(chosen))
    times = run_finals(problem, distinct, specialization, target, device, rounds=JUDGING_ROUNDS)
    numbers = [distinct.index(candidate) for candidate in chosen]
    return Stability(
        problem=problem.key,
        picks=tuple(numbers[:SEARCHES]),
        halves=tuple(numbers[SEARCHES:]),
        ms=tuple(round(measurement.ms, 5) for measurement in times),
        seconds=tuple(round(seconds, 1) for _, _, seconds in runs),
    )


def _searched(
    scope: Scope, seed: int, equipment: Equipment, trials: int
) -> tuple[Record, list[Record], float]:
    """What a search chose, all that it tried, and its wall clock."""
    shipped = shipped_table(scope.target.name)
    others = [] if shipped is None else [r for r in shipped.records if r.problem != scope.problem]
    request = SearchRequest(
        problem=scope.problem,
        target=scope.target,
        device=0,
        budget=Budget(trials, None, None),
        seed=seed,
        experience=Experience(warm_configs(others, scope), shipped_fit()),
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


def _selected_again(records: Sequence[Record], scope: Scope, device: torch.device) -> Record:
    """What is selected among finalists when they are timed once more, with fewer samples."""
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
    yield "| problem | picks of the searches | cost | picks of the halves | cost | seconds |"
    yield "| --- | --- | ---: | --- | ---: | --- |"
    for entry in found:
        names = ["ABCDEFGH"[number] for number in (*entry.picks, *entry.halves)]
        yield (
            f"| {entry.problem} | {' '.join(names[:SEARCHES])} | {entry.cost(entry.picks):.2%} "
            f"| {' '.join(names[SEARCHES:])} | {entry.cost((entry.picks[0], *entry.halves)):.2%} "
            f"| {' '.join(f'{seconds:.0f}' for seconds in entry.seconds)} |"
        )
    changed = sum(len(set(entry.picks)) > 1 for entry in found)
    worst = max(entry.cost(entry.picks) for entry in found)
    yield ""
    yield f"The pick changed on {changed} of {len(found)} shapes; the worst change costs {worst:.2%}."


def main() -> None:
    """Searches the shapes of the command line again and again."""
    parser = argparse.ArgumentParser(description="How often repeated searches pick differently.")
    parser.add_argument("--shape", action="append", help="as for flashtune search; repeatable")
    parser.add_argument("--trials", type=int, default=TRIALS, help="the budget of each search")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures, in JSON")
    options = parser.parse_args()
    found: list[Stability] = []
    try:
        target, device = device_target(0), torch.device("cuda", 0)
        problems = [problem for shape in options.shape or SHAPES for problem in parse_shape(shape)]
        with open_equipment(0) as equipment:
            for problem in problems:
                found.append(stability(problem, target, device, equipment, options.trials))
                if options.save is not None:
                    options.save.write_bytes(msgspec.json.encode(found))
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print("\n".join(_lines(found)))


if __name__ == "__main__":
    main()
