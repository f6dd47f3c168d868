"""Policies: who proposes candidates to a search, and from which start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.perf_model.calibration import Fit
from flashtune.tuner.search.optuna_study import Answer
from flashtune.tuner.search.proposer import Proposer
from flashtune.tuner.search.ranking import opening, rank

# Candidates that are tried in the order of their predicted times before the sampler takes over.
START = 24
# A space of so few candidates is no matter for a sampler.
ENUMERATED = 96


class Proposes(Protocol):
    """Proposes candidates one by one, and hears what became of them."""

    def ask(self) -> Candidate | None:
        """The next candidate to try, None when there is nothing new. It is open until it is told."""
        ...

    def tell(self, candidate: Candidate, answer: Answer) -> None:
        """Learns what became of an open candidate."""
        ...


class Knowledge(msgspec.Struct, frozen=True):
    """What a search knows before it begins.

    Attributes:
        scope: Where it looks.
        promised: What is tried first and in any case: defaults, and winners of near shapes.
        answers: What earlier searches of the same problem found.
        trials: How many candidates may be tried, those of earlier searches included; None without limit.
        seed: Of whatever is random.
        fit: How predictions are corrected.
    """

    scope: Scope
    promised: tuple[Candidate, ...]
    answers: dict[Candidate, Answer]
    trials: int | None
    seed: int
    fit: Fit


Policy = Callable[[Knowledge], Proposes]


def default_policy(known: Knowledge) -> Proposer:
    """The policy of every search; a small space is walked through in the order of predicted times."""
    ranked = rank(known.scope, known.seed, known.fit)
    everything = tuple(entry.candidate for entry in ranked)
    few = len(everything) <= ENUMERATED and (known.trials is None or len(everything) <= known.trials)
    start = (*known.promised, *(everything if few else opening(ranked, START)))
    return Proposer(known.scope, start, ranked, known.answers, known.seed)
