from typing import Any

import pytest

from flashtune import testing
from flashtune.core.config import Axis, Config, Space
from flashtune.core.problem import Dtype
from flashtune.core.target import TARGETS, Target
from flashtune.templates.forward_q_outer.space import Loads, QOuterConfig
from flashtune.templates.registry import families


def a_space() -> Space:
    axes = (
        Axis("block_m", (64, 128)),
        Axis("block_n", (32, 64)),
        Axis("num_warps", (4,)),
        Axis("num_stages", (2,)),
        Axis("loads", tuple(Loads), ordered=False),
        Axis("overlap_qk", (False, True), only_if=lambda chosen: chosen["loads"] is Loads.DESCRIPTOR),
    )
    return Space(QOuterConfig, axes, _is_admitted)


def _is_admitted(config: Config) -> bool:
    assert isinstance(config, QOuterConfig)
    return config.block_m != 4 * config.block_n


def test_space_enumerates_each_valid_config_once() -> None:
    space = a_space()
    configs = list(space.configs())
    # Four tiles less the one that is not admitted, by pointer or by descriptor, this one ahead or not.
    assert len(configs) == len(set(configs)) == space.size() == 3 * 3
    assert all(space.contains(config) for config in configs)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 256},
        {"block_m": 128, "block_n": 32},
        {"overlap_qk": True},
        {"maxnreg": 128},
        {"num_warps": 8},
    ],
    ids=["no value", "not admitted", "inactive axis", "field without an axis", "single value"],
)
def test_space_does_not_contain_invalid_configs(changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    space = a_space()
    assert space.contains(QOuterConfig(**base))
    assert not space.contains(QOuterConfig(**(base | changes)))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", [dtype for dtype in Dtype if not dtype.is_quantized])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_spaces_are_not_empty_and_defaults_have_the_family_type(
    target: Target, dtype: Dtype, head_dim: int
) -> None:
    problem = testing.problem(
        "heads=4,kv_heads=2,seqlen_q=64,seqlen_kv=4096,head_dim=64,causal", dtype=dtype, head_dim=head_dim
    )
    for family in families():
        reason = family.supports(problem, target)
        if reason is not None:
            assert family.name in reason
            continue
        assert next(family.space(problem, target).configs(), None) is not None
        assert type(family.default(problem, target)) is family.config_type
