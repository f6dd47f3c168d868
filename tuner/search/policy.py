"""The interface that proposes candidates to a search, and the default policy."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.perf_model.prediction import Calibration
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.proposer import DefaultStrategy
from flashtune.tuner.search.ranking import initial_design, rank

# Candidates that are tried in the order of their predicted times before the sampler is used.
NUM_STARTUP_TRIALS = 24
# Spaces of up to this many candidates are enumerated.
ENUMERATED = 96


class Strategy(Protocol):
    """Proposes candidates one by one, and receives their results."""

    def ask(self) -> Candidate | None:
        """Returns the next candidate, None if no new one is left. It is open until `tell` is called."""
        ...

    def tell(self, candidate: Candidate, answer: TrialResult) -> None:
        """Receives the result of an open candidate."""
        ...

    def expected_gain(self) -> float:
        """Returns by which fraction of its time the best may still improve; infinite if unknown."""
        ...


class SearchContext(msgspec.Struct, frozen=True):
    """The context of a search: its task, earlier results, budget and seed."""

    scope: SearchTask  # The problem, the GPU and the spaces.
    # Candidates that are always tried first: defaults, and winners of near shapes.
    enqueued: tuple[Candidate, ...]
    answers: dict[Candidate, TrialResult]  # Results of earlier searches of the same problem.
    # Maximum number of trials, including those of earlier searches; None for no limit.
    trials: int | None
    seed: int  # Seed of all random choices.
    fit: Calibration  # Corrections of predicted times.


Policy = Callable[[SearchContext], Strategy]


def default_policy(context: SearchContext) -> DefaultStrategy:
    """Returns the default proposer. It tries small spaces entirely, in the order of predicted times.

    Candidates are ranked in a thread, while workers start and the enqueued candidates compile.
    """
    thread = ThreadPoolExecutor(1)
    ranked = thread.submit(rank, context.scope, context.seed, context.fit).result
    thread.shutdown(wait=False)

    def start() -> Iterator[Candidate]:
        yield from context.enqueued
        everything = tuple(entry.candidate for entry in ranked())
        few = len(everything) <= ENUMERATED and (context.trials is None or len(everything) <= context.trials)
        yield from everything if few else initial_design(ranked(), NUM_STARTUP_TRIALS)

    return DefaultStrategy(context.scope, start(), ranked, context.answers, context.seed)
