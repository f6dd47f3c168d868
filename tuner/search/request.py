"""The request, progress and result of a search."""

import enum
from collections.abc import Callable

import msgspec

from flashtune.core.config import Space
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import Target
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.perf_model.prediction import Calibration


class Budget(msgspec.Struct, frozen=True):
    """When to stop. None disables a limit.

    Attributes:
        trials: Candidates that were compiled and ran or failed, those of earlier searches included.
        seconds: Wall clock for one shape, the finals and the last verification not included.
        patience: Candidates in a row that did not improve on the best.
    """

    trials: int | None = 320
    seconds: float | None = 60.0
    patience: int | None = 110


class WarmStart(msgspec.Struct, frozen=True):
    """The warm start of a search, from earlier measurements of other problems.

    Attributes:
        warm: Configs that won on near shapes.
        fit: Corrections of predicted times.
    """

    warm: tuple[Candidate, ...]
    fit: Calibration


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One search.

    Attributes:
        problem: The problem to compute.
        device: Index of that GPU on this machine; None predicts times instead of measuring them.
        budget: When to stop.
        families: Names of the families to search; empty for all that compute the problem.
        seed: Seed of the sampler.
        jobs: Number of compiler processes; None for the number of cores.
        spaces: Spaces that replace those of the families, by family.
        experience: The warm start; None takes it from the database and the shipped tables.
        retry_failed: Whether candidates that failed in earlier searches are tried again.
        lse: Whether forward kernels return the log-sum-exp, which training saves.
    """

    problem: Problem
    target: Target
    device: int | None = None
    budget: Budget = Budget()
    families: tuple[str, ...] = ()
    seed: int = 0
    jobs: int | None = None
    spaces: tuple[tuple[str, Space], ...] = ()
    experience: WarmStart | None = None
    retry_failed: bool = False
    lse: bool = False


class Phase(enum.StrEnum):
    """The phases of a search."""

    STARTING = "starting"
    SEARCHING = "searching"
    FINALS = "finals"
    DONE = "done"


class Stop(enum.StrEnum):
    """Why a search stopped."""

    EXHAUSTED = "every candidate was tried"
    TRIALS = "the budget of trials is spent"
    SECONDS = "the budget of seconds is spent"
    PATIENCE = "nothing better is expected"


class Tally(msgspec.Struct, frozen=True):
    """Counts of candidates.

    Attributes:
        outcomes: Number of candidates by outcome, those of earlier searches included.
        pruned: Number of infeasible candidates that the SRAM model rejected before compiling.
        reused: Number of candidates with results of earlier searches.
    """

    outcomes: dict[Outcome, int]
    pruned: int = 0
    reused: int = 0

    @property
    def tried(self) -> int:
        """Returns the number of candidates that were not pruned."""
        return sum(self.outcomes.values()) - self.pruned


class Progress(msgspec.Struct, frozen=True):
    """The progress of a running search.

    Attributes:
        phase: The present phase.
        counts: Counts of candidates so far.
        expected: Maximum number of trials; None without such a budget.
        best: The best record so far.
        seconds: Seconds since the start.
        remaining: Estimated seconds until the end; None if unknown.
        finished: Records of candidates that finished since the last report.
    """

    problem: Problem
    phase: Phase
    counts: Tally
    expected: int | None
    best: Record | None
    seconds: float
    remaining: float | None
    finished: tuple[Record, ...] = ()


Observer = Callable[[Progress], None]


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search.

    Attributes:
        provenance: Whether times were measured or predicted.
        stop: Why the search stopped.
        seconds: Wall-clock time.
        counts: Counts of candidates.
        candidates: Size of the spaces.
        best: The chosen record; None if no candidate works.
        best_id: Its row in the database.
        is_selected: Whether it became the selection.
        fallback: The fallback for tensors that the selection's family cannot address; None if it
            can address all.
        default: The record of the fastest default config, timed in the same finals if there were any.
        reasons: The most frequent reasons of failed candidates, with their counts.
    """

    problem: Problem
    target: Target
    provenance: Provenance
    stop: Stop
    seconds: float
    counts: Tally
    candidates: int
    best: Record | None
    best_id: int | None
    is_selected: bool
    default: Record | None
    fallback: Record | None = None
    reasons: tuple[tuple[str, int], ...] = ()
