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
    """When to stop, and the extent of the final measurement. None disables a limit.

    The default is that of a thorough search. `BUDGETS` has the budget of each effort.
    """

    # Candidates that were compiled and ran or failed, those of earlier searches included.
    trials: int | None = 320
    # Wall clock for one shape. Starting the command, the finals and the last verification are not included.
    seconds: float | None = 60.0
    patience: int | None = 110  # Candidates in a row that did not improve on the best.
    # The search stops if the surrogate expects no candidate to improve the time by this fraction.
    gain: float | None = None
    # Candidates in the final interleaved measurement. The number is large because first times are taken
    # alone: the GPU is hotter when only fast kernels run, and the order within a few percent changes much.
    finalists: int = 24
    # Candidates slower than this many times the best are not finalists, and are not verified in full.
    within: float = 1.15
    # Limit of the time in which the closest finalists are measured once more, in seconds.
    closest_seconds: float = 15.0


class Effort(enum.StrEnum):
    """How long a search looks for a faster kernel."""

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"


# Standard deviation of the natural logarithm of a measured time.
NOISE = 0.005
# A default search stops if the expected gain is less than the noise of one time. A quick search accepts a
# loss of twice that. Their limits of seconds leave time for the finals: in all 15 s and 35 s are the aim.
BUDGETS = {
    Effort.QUICK: Budget(seconds=7.0, gain=2 * NOISE, finalists=8, within=1.08, closest_seconds=2.0),
    Effort.DEFAULT: Budget(seconds=26.0, gain=NOISE, closest_seconds=5.0),
    Effort.THOROUGH: Budget(),
}


def budget_of(effort: Effort, trials: int | None = None, seconds: float | None = None) -> Budget:
    """Returns the budget of an effort. Trials or seconds replace its limits."""
    if trials is None and seconds is None:
        return BUDGETS[effort]
    limits = {"trials": trials, "seconds": seconds, "patience": None, "gain": None}
    return msgspec.structs.replace(BUDGETS[effort], **limits)


class WarmStart(msgspec.Struct, frozen=True):
    """The warm start of a search, from earlier measurements of other problems."""

    warm: tuple[Candidate, ...]  # Configs that won on near shapes.
    fit: Calibration  # Corrections of predicted times.


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    problem: Problem
    target: Target
    # Index of that GPU on this machine; None predicts times instead of measuring them.
    device: int | None = None
    budget: Budget = BUDGETS[Effort.DEFAULT]  # When to stop.
    # Names of the families to search; empty for all that compute the problem.
    families: tuple[str, ...] = ()
    seed: int = 0  # Seed of the sampler.
    jobs: int | None = None  # Number of compiler processes; None for the number of cores.
    # Spaces that replace those of the families, by family.
    spaces: tuple[tuple[str, Space], ...] = ()
    # The warm start; None takes it from the database and the shipped tables.
    experience: WarmStart | None = None
    # Whether candidates that failed in earlier searches are tried again.
    retry_failed: bool = False
    driver: str | None = None  # As in `SearchTask`.
    lse: bool = False  # Whether forward kernels return the log-sum-exp, which training saves.


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
    PATIENCE = "nothing better was found for a while"
    GAIN = "nothing better is expected"
    ELSEWHERE = "a worker elsewhere ended it"


class Tally(msgspec.Struct, frozen=True):
    """Counts of candidates."""

    # Number of candidates by outcome, those of earlier searches included.
    outcomes: dict[Outcome, int]
    # Number of infeasible candidates that the SRAM model rejected before compiling.
    pruned: int = 0
    reused: int = 0  # Number of candidates with results of earlier searches.

    @property
    def tried(self) -> int:
        """Returns the number of candidates that were not pruned."""
        return sum(self.outcomes.values()) - self.pruned


class Progress(msgspec.Struct, frozen=True):
    """The progress of a running search."""

    problem: Problem
    phase: Phase
    counts: Tally  # Counts of candidates so far.
    expected: int | None  # Maximum number of trials; None without such a budget.
    best: Record | None  # The best record so far.
    seconds: float  # Seconds since the start.
    remaining: float | None  # Estimated seconds until the end; None if unknown.
    finished: tuple[Record, ...] = ()  # Records of candidates that finished since the last report.
    worker: str = ""  # The name of the GPU or worker among several; empty for a search alone.


Observer = Callable[[Progress], None]


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search."""

    problem: Problem
    target: Target
    provenance: Provenance  # Whether times were measured or predicted.
    stop: Stop  # Why the search stopped.
    seconds: float  # Wall-clock time.
    counts: Tally  # Counts of candidates.
    candidates: int  # Size of the spaces.
    best: Record | None  # The chosen record; None if no candidate works.
    best_id: int | None  # Its row in the database.
    is_selected: bool  # Whether it became the selection.
    # The record of the fastest default config, timed in the same finals if there were any.
    default: Record | None
    # The fallback for tensors that the selection's family cannot address; None if it can address all.
    fallback: Record | None = None
    # The most frequent reasons of failed candidates, with their counts.
    reasons: tuple[tuple[str, int], ...] = ()
