"""SRAM of the tiles of a search space: the demand by which a search rejects candidates."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.tuner.analysis.charts import BYTES, Chart
from flashtune.tuner.candidates import (
    Demand,
    FamilySpace,
    SearchTask,
    contiguous_specialization,
    demand,
    open_spaces,
)


def sram_charts(problems: Iterable[Problem], target: Target, families: tuple[str, ...]) -> tuple[Chart, ...]:
    """Returns the least SRAM of a block over the sizes of tiles, one chart for each family and problem.

    It is the least demand of all configs of the family's space with this tile. `families` are those to show;
    empty for all that compute the problem.
    """
    return tuple(
        _chart(problem, target, space)
        for problem in problems
        for space in open_spaces(problem, target, families)
    )


def _chart(problem: Problem, target: Target, space: FamilySpace) -> Chart:
    task = SearchTask(problem, target, contiguous_specialization(problem), (space,))
    demands: defaultdict[tuple[int, int], list[Demand]] = defaultdict(list)
    for candidate in task.candidates():
        config = candidate.config
        demands[config.block_m, config.block_n].append(demand(task, candidate))  # type: ignore[attr-defined]
    rows, columns = (sorted({tile[side] for tile in demands}) for side in (0, 1))
    configs = list(itertools.chain.from_iterable(demands.values()))
    return Chart(
        title=f"SRAM of {space.family.name} on {target.short_name}, head dim {problem.head_dim}",
        across="block_n",
        positions=tuple(columns),
        unit=BYTES,
        lines={
            f"block_m={m}": tuple(
                min((each.sram_bytes for each in demands.get((m, n), ())), default=None) for n in columns
            )
            for m in rows
        },
        limits={"capacity of a block": target.sram_per_block},
        beyond="over",
        log=False,
        notes={"configs that fit": f"{sum(not each.message for each in configs):,} of {len(configs):,}"},
    )
