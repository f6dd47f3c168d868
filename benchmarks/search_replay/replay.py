"""Simulates a search on a tabular benchmark, without compilation and measurement.

Driver, pipeline and strategy are those of a real search. Waiting is simulated: compilers that take as long as
in the table, and one GPU that runs one candidate at a time. A search of a minute takes only the time of its
own arithmetic.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from benchmarks.exhaustive.truth_table import TruthTable
from flashtune.core.config import Config, Space
from flashtune.core.errors import TableError
from flashtune.core.record import ERROR_OF_MEDIAN, Measurement, Outcome, Provenance, Verdict
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, FamilySpace, SearchTask, contiguous_specialization
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation, MachineCode

# Seconds of the GPU's process for one candidate in addition to timed launches. It loads the candidate and
# verifies it in full, or on small problems alone if it is far behind. A search of an H200 took 44 s for
# 132 candidates on 16 cores.
PROOF_SECONDS = 0.28
QUICK_SECONDS = 0.12
LAUNCHES = 32
# Seconds of a compilation that failed. No table has them.
FAILED_SECONDS = 1.0
FINAL_SAMPLES = 21

Result = TypeVar("Result")


class SimulatedClock:
    """A simulated clock that advances to the next event on each wait."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        """Simulated seconds since the clock was made."""
        return self._now

    def at(self, moment: float, happen: Callable[[], None]) -> None:
        """Lets something happen at a moment, or now if that is over."""
        heapq.heappush(self._due, (moment, next(self._numbers), happen))

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Advances until one of these jobs is done."""
        while not any(job.done() for job in pending):
            self._step()

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Advances until all of these jobs are done."""
        while not all(job.done() for job in pending):
            self._step()

    def _step(self) -> None:
        """Advances to the next event."""
        moment, _, happen = heapq.heappop(self._due)
        self._now = max(self._now, moment)
        happen()


class Servers:
    """Simulated workers with one job at a time; a job goes to the first free one."""

    def __init__(self, clock: SimulatedClock, count: int) -> None:
        self._clock = clock
        self._free = [0.0] * count

    def submit(self, seconds: float, result: Result) -> Future[Result]:
        """A job that takes so long once a server takes it, and then gives this."""
        end = max(self._clock.now(), heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        job: Future[Result] = Future()

        def finish() -> None:
            if not job.cancelled():
                job.set_result(result)

        self._clock.at(end, finish)
        return job


class SimulatedTrial(msgspec.Struct, frozen=True):
    """A simulated trial."""

    candidate: Candidate
    seconds: float  # Simulated seconds from the start to the result.
    seen_ms: float | None  # The time that the search received; None if the candidate failed.
    true_ms: float | None  # The best estimate of its time.


class Replay:
    """A `Compiler` and a `Measurer` that read results from one table.

    Attributes:
        provenance: Times were measured, though not now.
        tried: All finished candidates, in order.
        width: The number of compilers.
    """

    provenance = Provenance.MEASURED
    gpu_uuid = None

    def __init__(self, table: TruthTable, jobs: int, seed: int) -> None:
        candidates = [table.candidate(row) for row in table.rows]
        self._rows = dict(zip(candidates, table.rows, strict=True))
        self._first = dict(zip(candidates, table.first_times(), strict=True))
        self._true = dict(zip(candidates, table.times(), strict=True))
        self._noise = random.Random(seed)  # noqa: S311 - no secret
        self.clock = SimulatedClock()
        self._compilers = Servers(self.clock, jobs)
        self._gpu = Servers(self.clock, 1)
        self.tried: list[SimulatedTrial] = []
        self.width = jobs

    def equipment(self) -> SearchWorkers:
        """The compiler, measurer and clock of a search."""
        return SearchWorkers(self, self, self.clock)

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        """Compiles, in as long as it took when the table was made."""
        del scope  # a table has one
        row = self._rows[candidate]
        failed = row.resources is None or row.outcome is Outcome.INFEASIBLE
        compiled = Compiled(
            outcome=row.outcome if failed else Outcome.OK,
            kernel=_digest(candidate),
            resources=row.resources,
            message=row.message if failed else "",
        )
        seconds = row.resources.compile_seconds if row.resources else FAILED_SECONDS
        job = self._compilers.submit(seconds, compiled)
        if failed:
            job.add_done_callback(lambda done: self._log(candidate, None))
        return job

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Answers with the time in the table, give or take the noise of its samples."""
        del scope, compiled  # the table knows
        row = self._rows[candidate]
        ms = self._first[candidate]
        if ms is None or row.first is None:
            job = self._gpu.submit(QUICK_SECONDS, Evaluation(row.outcome, message=row.message))
            job.add_done_callback(lambda done: self._log(candidate, None))
            return job
        error = ERROR_OF_MEDIAN * (row.first.p80 - row.first.p20) / max(1, row.first.samples) ** 0.5
        seen = max(ms / 2, self._noise.gauss(ms, error))
        pruned = drop_above_ms is not None and seen > drop_above_ms
        measurement = Measurement(seen, seen, seen, row.first.samples)
        verdict = None if pruned else _PASSED
        seconds = (QUICK_SECONDS if pruned else PROOF_SECONDS) + LAUNCHES * ms / 1e3
        job = self._gpu.submit(seconds, Evaluation(Outcome.OK, verdict, measurement))
        job.add_done_callback(lambda done: self._log(candidate, seen))
        return job

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        """Does nothing: start-up is not simulated."""

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> None:
        """Does nothing: tables contain no verification with delays."""

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        """Answers with the best knowledge of each, noise left out."""
        del scope, closest_seconds
        times = [self._true[candidate] or 0.0 for candidate in candidates]
        measured = tuple(Measurement(ms, ms, ms, FINAL_SAMPLES) for ms in times)
        return self._gpu.submit(FINAL_SAMPLES * sum(times) / 1e3, measured)

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Returns no result: tables contain no verification with delays."""
        del scope, candidate
        return self._gpu.submit(0.0, None)

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        """Returns nothing: tables contain no machine code."""
        del scope, candidate
        return self._gpu.submit(0.0, ())

    def _log(self, candidate: Candidate, seen: float | None) -> None:
        self.tried.append(SimulatedTrial(candidate, self.clock.now(), seen, self._true[candidate]))


_PASSED = Verdict(passed=True, worst_ratio=0.0, checks=1, failed="", device="replay")


def _digest(candidate: Candidate) -> str:
    return hashlib.sha256(msgspec.json.encode((candidate.family, candidate.config))).hexdigest()[:32]


def replay_space(table: TruthTable) -> Space:
    """The family's space for the table's problem, restricted to the configs of the table."""
    family, target = find_family(table.family), find_target(table.target)
    configs: frozenset[Config] = frozenset(table.candidate(row).config for row in table.rows)
    space = family.space(table.problem, target)
    if strange := sum(not space.contains(config) for config in configs):
        raise TableError(
            f"{strange} configs of the truth table of {table.problem.key} are no points of "
            f"{table.family}'s space: make it anew with benchmarks/exhaustive/truth.py"
        )
    return msgspec.structs.replace(space, admits=configs.__contains__)


def replay_scope(table: TruthTable) -> SearchTask:
    """Where a replayed search looks."""
    spaces = (FamilySpace(find_family(table.family), replay_space(table)),)
    specialization = contiguous_specialization(table.problem)
    return SearchTask(table.problem, find_target(table.target), specialization, spaces)


def best_after(tried: Sequence[SimulatedTrial], finalists: int) -> list[float]:
    """Returns the result of a search after each trial: the best true time among the measured finalists.

    It is in ms, and infinite while no candidate is valid.
    """
    answers: list[float] = []
    leading: list[tuple[float, float]] = []
    for entry in tried:
        if entry.seen_ms is not None and entry.true_ms is not None:
            leading = sorted([*leading, (entry.seen_ms, entry.true_ms)])[:finalists]
        answers.append(min((true for _, true in leading), default=float("inf")))
    return answers
