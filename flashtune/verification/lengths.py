"""How many queries and keys each sequence of a problem has."""

from __future__ import annotations

import random
from typing import NamedTuple

from flashtune.core.problem import Problem

# Lengths of packed sequences are drawn log-uniformly from this part of the longest on, as requests' are.
SHORTEST_PART = 1 / 16
# A fixed seed: what is timed and what is proven at a tuned shape are the same lengths everywhere.
SEED = 20


class Lengths(NamedTuple):
    """Queries and keys of each sequence.

    Attributes:
        queries: Of each sequence, none longer than the problem's `seqlen_q`.
        keys: Likewise, `seqlen_kv`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def total_q(self) -> int:
        """Rows of packed queries."""
        return sum(self.queries)


def is_ragged(problem: Problem) -> bool:
    """Whether sequences of a problem may differ in length."""
    return bool(problem.packed or problem.lengths or problem.page_size)


def equal_lengths(problem: Problem) -> Lengths:
    """All sequences as long as the longest."""
    return Lengths((problem.seqlen_q,) * problem.batch, (problem.seqlen_kv,) * problem.batch)


def usual_lengths(problem: Problem) -> Lengths:
    """Lengths as at a tuned shape, the same at every call.

    Packed queries: log-uniform between a sixteenth of the longest and the longest, which is there once, and
    as many in all as `packed` says, as far as that can be. Keys of packed sequences are longer than their
    queries by the ratio of the longest. Keys of others: the longest once, else uniform from half of it on.
    """
    if not (is_ragged(problem) and problem.batch):
        return equal_lengths(problem)
    chance = random.Random(SEED)  # noqa: S311 - no secret
    if problem.packed:
        queries = _with_total(problem, chance)
        ratio = problem.seqlen_kv / max(1, problem.seqlen_q)
        keys = (min(problem.seqlen_kv, round(length * ratio)) for length in queries)
        return Lengths(queries, tuple(keys))
    drawn = [chance.randint(-(-problem.seqlen_kv // 2), problem.seqlen_kv) for _ in range(problem.batch - 1)]
    return Lengths((problem.seqlen_q,) * problem.batch, (problem.seqlen_kv, *drawn))


def _with_total(problem: Problem, chance: random.Random) -> tuple[int, ...]:
    """Query lengths with the sum that a problem asks for: all are stretched alike, and cut at the longest."""
    longest = problem.seqlen_q
    drawn = [SHORTEST_PART ** chance.random() for _ in range(problem.batch - 1)]
    wanted = problem.packed - longest

    def stretched(factor: float) -> list[int]:
        return [max(1, min(longest, round(factor * part))) for part in drawn]

    low, high = 0.0, longest / SHORTEST_PART
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(stretched(middle)) < wanted else (low, middle)
    lengths = stretched(high)
    # Rounding leaves a few tokens: they go to or come from whoever has room.
    over = sum(lengths) - wanted
    for index, length in enumerate(lengths):
        lengths[index] = max(1, min(longest, length - over))
        over -= length - lengths[index]
    return (longest, *lengths)
