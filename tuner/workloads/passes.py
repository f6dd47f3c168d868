"""The two passes of a problem: training computes a problem's output and then its gradients."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.core.canonical import normal_form
from flashtune.core.problem import Direction, Problem


def forward_of(problem: Problem) -> Problem:
    """The forward pass whose gradients a backward problem asks for; a forward problem itself."""
    if not problem.is_backward:
        return problem
    return normal_form(msgspec.structs.replace(problem, direction=Direction.FORWARD))


def backward_of(problem: Problem) -> Problem:
    """The gradients of a forward problem, in whatever order they are summed; a backward problem itself."""
    return msgspec.structs.replace(problem, direction=Direction.BACKWARD)


def training_passes(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Both passes of each problem, the forward one first, none twice."""
    return tuple(
        dict.fromkeys(one for problem in problems for one in (forward_of(problem), backward_of(problem)))
    )


def saving_lse(problems: Iterable[Problem]) -> frozenset[Problem]:
    """The forward problems whose backward is among the problems too: it needs their log-sum-exp."""
    listed = tuple(problems)
    trained = {forward_of(problem) for problem in listed if problem.is_backward}
    return frozenset(problem for problem in listed if problem in trained)
