"""What a search is asked for, what it says while it runs, and what it comes to."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from flashtune.core.config import Space
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import Target
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.perf_model.calibration import Fit


class Budget(msgspec.Struct, frozen=True):
    """When to stop; None where something is no reason to stop.

    Attributes:
        trials: Candidates that were compiled and ran or failed, those of earlier searches included.
        seconds: Wall clock for one shape, the finals and the last proof not included.
        patience: Candidates in a row that did not improve on the best.
    """

    trials: int | None = 320
    seconds: float | None = 60.0
    patience: int | None = 110


class Experience(msgspec.Struct, frozen=True):
    """What earlier measurements of other problems say to a search.

    Attributes:
        warm: Configs that won on near shapes.
        fit: How predictions are corrected.
    """

    warm: tuple[Candidate, ...]
    fit: Fit


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One search.

    Attributes:
        problem: What must be computed.
        target: For which GPU.
        device: Index of that GPU on this machine; None predicts in place of measuring.
        budget: When to stop.
        families: Names of the families to search; all that compute the problem where empty.
        seed: Of the sampler.
        jobs: Compiler processes; as many as there are cores where None.
        spaces: Spaces to search in place of the families' own, by family.
        experience: What the search begins with, in place of what was measured here and elsewhere.
        retry_failed: Whether candidates that failed in earlier searches are tried again.
        lse: Whether kernels of a forward pass are to give the log-sum-exp, which training saves.
    """

    problem: Problem
    target: Target
    device: int | None = None
    budget: Budget = Budget()
    families: tuple[str, ...] = ()
    seed: int = 0
    jobs: int | None = None
    spaces: tuple[tuple[str, Space], ...] = ()
    experience: Experience | None = None
    retry_failed: bool = False
    lse: bool = False


class Phase(enum.StrEnum):
    """What a search is doing."""

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
    """What became of candidates.

    Attributes:
        outcomes: How many ended how, those of earlier searches included.
        pruned: How many of the infeasible the SRAM model ruled out before compiling.
        reused: How many were answered by earlier searches.
    """

    outcomes: dict[Outcome, int]
    pruned: int = 0
    reused: int = 0

    @property
    def tried(self) -> int:
        """Candidates that were worth a compilation."""
        return sum(self.outcomes.values()) - self.pruned


class Progress(msgspec.Struct, frozen=True):
    """A search while it runs.

    Attributes:
        problem: What is searched.
        phase: What it is doing.
        tally: What became of candidates so far.
        expected: Candidates that will have been tried in the end, at most; None without such a budget.
        best: The best record so far.
        seconds: Since the start.
        remaining: Seconds until the end, as far as can be foreseen; None where that is unknown.
        finished: Records of candidates that finished since the last report.
    """

    problem: Problem
    phase: Phase
    tally: Tally
    expected: int | None
    best: Record | None
    seconds: float
    remaining: float | None
    finished: tuple[Record, ...] = ()


Observer = Callable[[Progress], None]


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a search came to.

    Attributes:
        problem: What was searched.
        target: For which GPU.
        provenance: Whether times were measured or predicted.
        stop: Why it stopped.
        seconds: Wall clock.
        tally: What became of candidates.
        candidates: Size of the spaces.
        best: The record that was chosen, None where nothing works.
        best_id: Its row in the database.
        pinned: Whether it was made the selection.
        stand_in: The record that serves the tensors that the selection's family cannot address; None
            where it addresses all.
        default: The default config's record, timed in the same finals where there were any.
        reasons: Why candidates failed, the most frequent reasons and how often.
    """

    problem: Problem
    target: Target
    provenance: Provenance
    stop: Stop
    seconds: float
    tally: Tally
    candidates: int
    best: Record | None
    best_id: int | None
    pinned: bool
    default: Record | None
    stand_in: Record | None = None
    reasons: tuple[tuple[str, int], ...] = ()
