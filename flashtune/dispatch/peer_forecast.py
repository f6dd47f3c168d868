"""Estimated times of SDPA's backends at shapes where they were not timed.

The estimate is the time of a schedule with one program per tile (`portable_span`) times a correction. The
correction is the mean ratio of measured to scheduled time at the tuned shapes, with larger weights for near
shapes, as in `flashtune.dispatch.forecast`. SDPA's kernels have such schedules.
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

# Prefix of the names of SDPA's backends in records.
SDPA = "sdpa-"
# Queries and keys of a tile of SDPA's fused kernels.
TILE = 128


def expected_peers(problem: Problem, records: Iterable[Record], target: Target) -> tuple[PeerTime, ...]:
    """Returns the estimated times of SDPA's backends at a shape, in ms. Empty if none was timed.

    Args:
        problem: A shape that is not tuned.
        records: Tuned records of the same computation at other shapes.
        target: The GPU.
    """
    # Records of one problem were timed in one run with the same baselines.
    timed = {record.problem.key: record for record in records if record.measurement is not None}
    pairs: dict[str, list[tuple[float, float]]] = {}
    # Sort, so that all ranks sum in the same order.
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
    """Returns the schedule time at a shape in ms, up to a factor that is the same for all shapes."""
    forward = msgspec.structs.replace(unpacked(problem), direction=Direction.FORWARD)
    return portable_span(forward, TILE, TILE, target)
