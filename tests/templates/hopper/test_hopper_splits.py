"""Tests of the numbers of splits of Hopper's tiles: spaces, defaults, and the problems that verify them."""

import ast
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import KernelError
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype
from flashtune.templates.common.model.splits import MAX_DECODED, count_tiles
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level, companions
from tests.problems.hopper import FAMILY, H200, PLAIN, a_config, a_problem, sram_bytes

# One KV head, so that there are few tiles.
FEW: dict[str, Any] = {"kv_heads": 1, "batch": 1, "seqlen_kv": 65_536, "causal": Causal.BOTTOM_RIGHT}


@pytest.mark.parametrize("queries", [17, 64, 200, 512])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"packed": 512},
        {"page_size": 16},
        {"window_left": 8191},
        {"page_size": 64, "kv_dtype": KvDtype.E4M3},
        {"kv_lengths": True, "sinks": True},
    ],
    ids=str,
)
def test_few_tiles_over_long_keys_are_split_by_default(queries: int, features: dict[str, Any]) -> None:
    packed = {"packed": queries} if "packed" in features else {}
    problem = a_problem(128, **FEW, seqlen_q=queries, **{**features, **packed})
    config = FAMILY.default(problem, H200)
    assert FAMILY.space(problem, H200).contains(config)
    tiles = count_tiles(problem, config.block_m, config.pack_gqa) * config.num_splits  # type: ignore[attr-defined]
    assert H200.sm_count // 2 < tiles <= 2 * H200.sm_count
    whole = msgspec.structs.replace(config, num_splits=1)
    assert FAMILY.makespan_ms(problem, config, H200) < 0.5 * FAMILY.makespan_ms(problem, whole, H200)
    assert sram_bytes(problem, config) < sram_bytes(problem, whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": MAX_DECODED},
        {"seqlen_kv": 512},
        {"batch": 64, "kv_heads": 8},
        {"dropout": True},
        {"bias": Bias.BOOLEAN},
        {"bias": Bias.ADDITIVE},
        {"dtype": Dtype.E4M3},
        {"window_left": 100},
    ],
    ids=str,
)
def test_other_problems_have_one_split(changes: dict[str, Any]) -> None:
    problem = a_problem(128, **{**FEW, "seqlen_q": 64, **changes})
    axes = {axis.name: axis.values for axis in FAMILY.space(problem, H200).axes}
    assert axes["num_splits"] == (1,)
    config = FAMILY.default(problem, H200)
    if problem.features & {"dropout", "bias"} or problem.dtype.is_quantized:
        with pytest.raises(KernelError, match="set num_splits to 1"):
            render(FAMILY, problem, msgspec.structs.replace(config, num_splits=2), PLAIN)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("stored", [None, KvDtype.E4M3, KvDtype.INT8], ids=str)
@pytest.mark.parametrize(
    "features",
    [{"packed": 64}, {}, {"batch_invariant": True}, {"batch_invariant": True, "packed": 64}],
    ids=str,
)
def test_all_roles_take_tiles_in_the_same_way(
    splits: int, stored: KvDtype | None, features: dict[str, Any]
) -> None:
    problem = a_problem(128, **FEW, seqlen_q=64, page_size=16, kv_dtype=stored, **features)
    config = a_config(problem, num_splits=splits, split_epilogue=False)
    tree = ast.parse(render(FAMILY, problem, config, PLAIN).source)
    taken = {
        role.name: {
            node.attr
            for node in ast.walk(role)
            if isinstance(node, ast.Attribute) and node.attr.endswith("_tile")
        }
        for role in tree.body
        if isinstance(role, ast.FunctionDef) and role.name in ("produce", "convert", "consume")
    }
    assert len(taken) == 2 + (stored is not None)
    assert len(set(map(frozenset, taken.values()))) == 1, taken


@pytest.mark.parametrize("level", [Level.QUICK, Level.FULL])
@pytest.mark.parametrize("features", [{}, {"packed": 64}], ids=str)
def test_kernels_with_splits_are_verified_at_their_borders(level: Level, features: dict[str, Any]) -> None:
    problem = a_problem(128, **FEW, seqlen_q=64, **features)
    split = a_config(problem, num_splits=12)
    whole = companions(problem, a_config(problem, num_splits=1), level, reduced=False)
    more = companions(problem, split, level, reduced=False)
    border = 12 * split.block_n
    assert len(more) > len(whole)
    lengths = {length for case in more for length in (case.problem.seqlen_kv, case.problem.seqlen_kv - 1)}
    assert {border + split.block_n, border, 2 * border} <= lengths
    assert max(case.problem.seqlen_kv for case in whole) < border
