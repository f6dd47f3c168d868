"""Expected times of SDPA's backends at shapes where they were not timed.

A backend takes what a schedule of programs of one tile each takes (`portable_span`), times what it took over
that schedule at the tuned shapes: all of them on average, the near ones most, as
`flashtune.dispatch.forecast` does for our own kernels. SDPA's kernels are of that construction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import msgspec

from flashtune.core.problem import Direction, Problem
from flashtune.core.record import PeerTime, Record
from flashtune.core.target import Target
from flashtune.dispatch.nearest import distance, regression
from flashtune.templates.common.model.makespan import portable_span
from flashtune.templates.common.model.traffic import unpacked

# How the names of its backends begin, as peers are named in records.
SDPA = "sdpa-"
# Queries and keys of a tile of SDPA's fused kernels.
TILE = 128


def expected_peers(problem: Problem, records: Iterable[Record], target: Target) -> tuple[PeerTime, ...]:
    """What each of SDPA's backends is expected to take at a shape, in ms; empty where none was timed.

    Args:
        problem: A shape that is not tuned.
        records: Tuned records of the same computation at other shapes.
        target: The GPU.
    """
    # Two records of one problem were timed in one run, with the same peers.
    timed = {record.problem.key: record for record in records if record.measurement is not None}
    pairs: dict[str, list[tuple[float, float]]] = {}
    # The same order of sums for all ranks.
    for _, record in sorted(timed.items()):
        assert record.measurement is not None
        for peer in record.measurement.peers:
            if peer.name.startswith(SDPA):
                longer = math.log(peer.ms / _schedule_ms(record.problem, target))
                pairs.setdefault(peer.name, []).append((longer, distance(record.problem, problem)))
    return tuple(
        PeerTime(name, _schedule_ms(problem, target) * math.exp(regression(known)))
        for name, known in sorted(pairs.items())
    )


@functools.lru_cache(maxsize=8192)
def _schedule_ms(problem: Problem, target: Target) -> float:
    """What the schedule takes at a shape, in ms, up to a factor that all shapes share."""
    forward = msgspec.structs.replace(unpacked(problem), direction=Direction.FORWARD)
    return portable_span(forward, TILE, TILE, target)
