"""Problems and configs of the family `forward_hopper` for tests."""

import random
from typing import Any

import msgspec

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.templates.forward_hopper.family import SPARE_BYTES
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.registry import find_family

FAMILY = find_family("forward_hopper")
H200 = find_target("h200")
PLAIN = Specialization()


def a_problem(head_dim: int = 128, value_head_dim: int = 0, **changes: Any) -> Problem:
    """8 heads of 1024 queries and keys, twice."""
    widths = {"head_dim": head_dim, "value_head_dim": value_head_dim or head_dim}
    return testing.problem("heads=8,seqlen=1024,head_dim=128,batch=2", **widths, **changes)


def a_config(problem: Problem, **changes: Any) -> HopperConfig:
    """The family's default with changes, decoded as a table's would be."""
    default = FAMILY.default(problem, H200)
    return msgspec.convert({**msgspec.to_builtins(default), **changes}, HopperConfig)


def sram_bytes(problem: Problem, config: HopperConfig) -> int:
    """The modelled SRAM size."""
    return sum(item.bytes for item in FAMILY.sram_items(problem, config, H200, PLAIN))


def sampled_configs(problem: Problem, count: int, seed: int = 0) -> list[HopperConfig]:
    """Different points of a problem's space that fit by the model; the same ones for the same seed."""
    space = FAMILY.space(problem, H200)
    chance = random.Random(f"{problem.key} {seed}")
    configs: dict[HopperConfig, None] = {}
    while len(configs) < count:
        config = space.choose(lambda axis: chance.choice(axis.values))
        assert isinstance(config, HopperConfig)
        if space.admits(config) and sram_bytes(problem, config) + SPARE_BYTES <= H200.sram_per_block:
            configs[config] = None
    return list(configs)
