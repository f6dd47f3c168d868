"""Performance model of split latent keys: SRAM and makespan; other splits of a config."""

import math
from collections.abc import Iterable

import msgspec

from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE, combining_us
from flashtune.templates.common.model.traffic import split_keys_items
from flashtune.templates.decode_latent_hopper.space import (
    BLOCK_N,
    ROWS,
    LatentConfig,
    latent_space,
    row_tiles,
)
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel

BARRIER_BYTES = 8
FLOAT32 = 4
# Blocks of probabilities in transit between the groups.
SLOTS = 2
# Barriers of halves, of the rest, of probabilities; of queries, and of the end.
BARRIERS_A_STAGE = 4
OTHER_BARRIERS = 2 + 2 * SLOTS + 2
# In µs: an empty launch, and a program before and after its keys.
LAUNCH = 4.0
PROGRAM = 3.0
# Fraction of the Tensor Cores' peak.
RATE = 0.65


class LatentModel(PerformanceModel[LatentConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: LatentConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns all allocations of a program, in bytes."""
        size = problem.dtype.itemsize
        rest = problem.head_dim - problem.value_head_dim
        barriers = BARRIERS_A_STAGE * config.num_stages + OTHER_BARRIERS
        return (
            BytesItem("q", ROWS * problem.head_dim * size),
            BytesItem(
                f"k, {config.num_stages} in flight",
                BLOCK_N * (config.num_stages * problem.value_head_dim + rest) * size,
            ),
            BytesItem("weights", SLOTS * ROWS * BLOCK_N * size),
            BytesItem("factors of rows", (SLOTS + 1) * ROWS * FLOAT32),
            BytesItem("barriers", barriers * BARRIER_BYTES),
        )

    def makespan_ms(self, problem: Problem, config: LatentConfig, target: Target) -> float:
        keys = distinct_keys(problem.sight)
        programs = row_tiles(problem, config) * problem.batch * config.num_splits
        if not programs or not keys:
            return LAUNCH / 1e3
        blocks = math.ceil(math.ceil(keys / BLOCK_N) / config.num_splits)
        rounds = math.ceil(programs / target.sm_count)
        products = 2 * ROWS * BLOCK_N * (problem.head_dim + problem.value_head_dim)
        block = products / (target.peak.half * 1e6 / target.sm_count * RATE)
        bandwidth = target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE
        busy = max(rounds * (blocks * block + PROGRAM), problem.minimal_bytes() / bandwidth + PROGRAM)
        return (LAUNCH + busy + combining_us(problem, config.num_splits, target)) / 1e3

    def schedule_variants(
        self, problem: Problem, config: LatentConfig, target: Target
    ) -> Iterable[LatentConfig]:
        """Returns points of a space that differ in the splits, or in the queries that share a tile."""
        space = latent_space(problem, target)
        axes = {axis.name: axis.values for axis in space.axes}
        for queries in axes["queries"]:
            for splits in axes["num_splits"]:
                other = msgspec.structs.replace(config, queries=queries, num_splits=splits)
                if space.contains(other):
                    yield other

    def hbm_items(self, problem: Problem, config: LatentConfig, target: Target | None = None) -> BytesItems:
        tiles = row_tiles(problem, config)
        return split_keys_items(problem, tiles, config.num_splits, target, tensors="k")
