"""What a launch of the Hopper family takes by its schedule, and how else its work could be spread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from flashtune.config import Space
from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.common.pace import Pace, block_us, tile_us, traffic_us
from flashtune.templates.common.schedule import Cost, Tiling, busiest, extremes, staying
from flashtune.templates.common.traffic import unpacked
from flashtune.templates.forward_hopper.space import HopperConfig

# By consumer groups: the more there are, the more of the softmax runs beside the others' products.
PACES = {
    1: Pace(launch=9.9, block=0.173, tile=0.663, hidden=-0.1, exposed=0.5),
    2: Pace(launch=9.9, block=0.173, tile=0.663, hidden=0.73, exposed=0.5),
    3: Pace(launch=9.9, block=0.173, tile=1.53, hidden=0.9, exposed=0.5),
}
MOST_GROUPS = max(PACES)
# More heads at a time than these won nowhere: docs/hopper.md.
SECTIONS = (0, 1, 4)


def hopper_span(problem: Problem, config: HopperConfig, target: Target) -> float:
    """Time of a launch by its schedule, in ms."""
    problem = unpacked(problem)
    tiling = Tiling(problem, config.block_m // config.pack, config.block_n, config.pack)
    pace = PACES[min(config.groups, MOST_GROUPS)]
    if not tiling.total or not problem.seqlen_kv:
        return pace.launch / 1e3
    cost = Cost(
        block_us(problem, config.block_m * config.block_n, pace, target),
        tile_us(problem, config.block_m, pace, target),
    )
    workers = staying(tiling.total, config.even, target.sm_count)
    busy = busiest(tiling, workers, config.section, config.order.value, cost)
    streamed = extremes(tiling).mean * tiling.total * config.block_n
    section = min(config.section or tiling.heads, tiling.heads)
    moving = traffic_us(problem, streamed, section / tiling.packs, workers, target)
    return (pace.launch + max(busy, moving)) / 1e3


def spread_otherwise(config: HopperConfig, space: Space) -> Iterator[HopperConfig]:
    """The points of a space with the same tile of a group that spread tiles otherwise."""
    axes = {axis.name: axis.values for axis in space.axes}
    sections = tuple(section for section in axes["section"] if section in SECTIONS)
    choices = (dict.fromkeys((config.groups, 1)), sections, axes["order"], axes["even"])
    for groups, section, order, even in itertools.product(*choices):
        other = msgspec.structs.replace(
            config,
            groups=groups,
            ping_pong=config.ping_pong and groups > 1,
            section=section,
            order=order,
            even=even,
        )
        if other != config and space.contains(other):
            yield other
