"""Numbers of queries and keys of a problem's sequences."""

import random
from typing import NamedTuple

from flashtune.core.problem import Problem

# Lengths of varlen sequences are log-uniform between this fraction of the longest and the longest, like those
# of requests.
SHORTEST_PART = 1 / 16
# The seed is fixed so that timing and verification of a tuned shape use the same lengths on all machines.
SEED = 20


class Lengths(NamedTuple):
    """Queries and keys of each sequence."""

    # Number of queries of each sequence, at most the problem's `seqlen_q`.
    queries: tuple[int, ...]
    keys: tuple[int, ...]  # Number of keys of each sequence, at most `seqlen_kv`.

    @property
    def total_q(self) -> int:
        """The number of query tokens in a varlen batch."""
        return sum(self.queries)


def is_ragged(problem: Problem) -> bool:
    """Returns whether sequences of a problem may differ in length."""
    return bool(problem.packed or problem.kv_lengths or problem.page_size)


def equal_lengths(problem: Problem) -> Lengths:
    """Returns lengths with all sequences as long as the longest."""
    return Lengths((problem.seqlen_q,) * problem.batch, (problem.seqlen_kv,) * problem.batch)


def usual_lengths(problem: Problem) -> Lengths:
    """Returns the lengths of a tuned shape. Every call returns the same.

    Query lengths of a varlen batch are log-uniform between a sixteenth of the longest and the longest. The
    longest occurs at least once, and the lengths sum up to `packed` if possible. Its key lengths are the
    query lengths times the ratio of the longest ones. Other key lengths are uniform between half of the
    longest and the longest, which occurs at least once.
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
    """Returns query lengths with the problem's total: all scaled by one factor and clamped to the longest."""
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
    # Rounding changes the total by a few tokens. Correct lengths that are not at a bound.
    over = sum(lengths) - wanted
    for index, length in enumerate(lengths):
        lengths[index] = max(1, min(longest, length - over))
        over -= length - lengths[index]
    return (longest, *lengths)
