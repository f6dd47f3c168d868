"""The two passes of training: a problem's forward pass, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.core.canonical import normal_form
from flashtune.core.problem import Direction, Problem


def forward_of(problem: Problem) -> Problem:
    """Returns the forward pass of a backward problem. A forward problem is returned unchanged."""
    if not problem.is_backward:
        return problem
    return normal_form(msgspec.structs.replace(problem, direction=Direction.FORWARD))


def backward_of(problem: Problem) -> Problem:
    """Returns the gradients of a forward problem, not deterministic. A backward problem is unchanged."""
    return msgspec.structs.replace(problem, direction=Direction.BACKWARD)


def training_passes(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Returns both passes of each problem, forward first, without duplicates."""
    return tuple(
        dict.fromkeys(one for problem in problems for one in (forward_of(problem), backward_of(problem)))
    )


def saving_lse(problems: Iterable[Problem]) -> frozenset[Problem]:
    """Returns the forward problems with a backward problem among `problems`. These need the log-sum-exp."""
    listed = tuple(problems)
    trained = {forward_of(problem) for problem in listed if problem.is_backward}
    return frozenset(problem for problem in listed if problem in trained)
