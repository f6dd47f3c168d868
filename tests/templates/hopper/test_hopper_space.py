"""Tests of the search space and the defaults of the Hopper family, and of the GPU tests' problems."""

import ast
import itertools
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.features.records import BlockLists
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.templates.family import unsupported_reason
from flashtune.templates.forward_hopper.family import SPARE_BYTES
from flashtune.templates.forward_hopper.space import Order, has_one_list
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level, companions, main_cases
from flashtune.verification.inputs import side_inputs
from flashtune.verification.inputs.prepared import prepare
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe
from tests.gpu.families.test_features_gpu import BLOCKS, SCHEDULES, scheduled, tuned
from tests.problems.hopper import FAMILY, H200, a_config, a_problem, sampled_configs, sram_bytes
from tests.problems.kernel_cases import TUNED

SIXTEEN_BITS = (Dtype.BF16, Dtype.FP16)
SPACES = [
    a_problem(64),
    a_problem(64, causal=Causal.TOP_LEFT, kv_heads=1),
    a_problem(128, causal=Causal.BOTTOM_RIGHT),
    a_problem(128, kv_heads=2, dtype=Dtype.FP16),
    a_problem(96, 80, causal=Causal.BOTTOM_RIGHT, kv_heads=4),
    a_problem(192, 128),
    a_problem(256, causal=Causal.TOP_LEFT),
    a_problem(40, 256),
    a_problem(128, kv_heads=1, seqlen_q=16),
    a_problem(96, dtype=Dtype.FP16, causal=Causal.TOP_LEFT, heads=12, kv_heads=4, seqlen_q=100),
    a_problem(128, dtype=Dtype.E4M3, kv_heads=2),
    a_problem(96, 64, dtype=Dtype.E4M3, causal=Causal.BOTTOM_RIGHT),
    a_problem(64, 80, dtype=Dtype.E4M3),
    a_problem(256, dtype=Dtype.E4M3),
    a_problem(128, causal=Causal.BOTTOM_RIGHT, window_left=100, kv_heads=2),
    a_problem(64, window_left=300, window_right=20),
    a_problem(128, dtype=Dtype.E4M3, causal=Causal.TOP_LEFT, window_left=1000),
    a_problem(128, causal=Causal.BOTTOM_RIGHT, packed=2048),
    a_problem(96, 80, kv_heads=4, packed=2048, window_left=64),
    a_problem(128, causal=Causal.BOTTOM_RIGHT, kv_heads=2, packed=2048, page_size=16, kv_dtype=KvDtype.E4M3),
    a_problem(64, kv_heads=2, page_size=64, kv_dtype=KvDtype.E4M3),
    a_problem(128, kv_heads=2, page_size=8, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE),
]
BY_SPACE = pytest.mark.parametrize("problem", SPACES, ids=lambda problem: problem.key)


@pytest.mark.slow
@BY_SPACE
def test_every_config_of_a_space_renders(problem: Problem) -> None:
    configs = sampled_configs(problem, 4)
    assert len(configs) == 4
    for number, config in enumerate(configs):
        kernel = render(FAMILY, problem, config, Specialization(lse=number % 2 == 0))
        names = {node.name for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef)}
        assert kernel.entry in names
        assert ("wait_named_barrier" in names) is config.ping_pong
        assert ("needs_rescale" in names) is config.conditional_rescale
        assert ("transpose_values" in names) is problem.dtype.is_quantized


@pytest.mark.slow
@BY_SPACE
def test_spaces_match_their_axes(problem: Problem) -> None:
    space = FAMILY.space(problem, H200)
    configs = sampled_configs(problem, 300)
    for config in configs:
        assert space.contains(config)
        assert config.block_m == config.num_consumer_groups * config.rows_per_group <= 256
        assert config.pack_gqa < 2 * problem.group_size
        assert config.pack_gqa == 1 or not problem.dtype.is_quantized
        assert config.num_consumer_groups > 1 or not config.ping_pong
        assert not config.p_stages or (problem.dtype.is_quantized and config.num_consumer_groups == 3)
        assert config.order is Order.LINEAR or problem.sight.right is not None
    assert len(set(configs)) == len(configs)


def test_invalid_configs_are_not_in_the_space() -> None:
    wide, narrow, eight_bits = a_problem(256), a_problem(64), a_problem(128, dtype=Dtype.E4M3)
    assert FAMILY.space(wide, H200).contains(a_config(wide))
    for problem, changes in (
        # More registers than a thread has.
        (wide, {"block_n": 128, "rows_per_group": 128, "split_epilogue": False}),
        (narrow, {"num_consumer_groups": 3, "rows_per_group": 128}),
        # Turns with one group, halves of a narrow output, packed heads that share no keys.
        (narrow, {"num_consumer_groups": 1, "ping_pong": True}),
        (narrow, {"split_epilogue": True}),
        (narrow, {"pack_gqa": 2}),
        (narrow, {"order": "lpt"}),
        # Weights in registers, of which three groups have too few; in shared memory, where two have enough.
        (eight_bits, {"num_consumer_groups": 3}),
        (eight_bits, {"p_stages": 1}),
        (narrow, {"num_consumer_groups": 3, "p_stages": 1}),
    ):
        assert not FAMILY.space(problem, H200).contains(a_config(problem, **changes))


def test_three_groups_are_allowed_for_8_bits() -> None:
    problem = a_problem(128, dtype=Dtype.E4M3)
    space = FAMILY.space(problem, H200)
    for tiles in (1, 2):
        config = a_config(problem, num_consumer_groups=3, p_stages=tiles)
        assert space.contains(config)
        # 64 bytes of weights for each of 128 keys, in each of three groups.
        kept = sram_bytes(problem, msgspec.structs.replace(config, p_stages=0))
        assert sram_bytes(problem, config) - kept == tiles * 3 * 64 * 128
        assert sram_bytes(problem, config) <= H200.sram_per_block
    # The default has them where tiles of 192 queries waste few rows: two where all tiles are alike.
    for causal, tiles in ((Causal.NONE, 2), (Causal.BOTTOM_RIGHT, 1)):
        long = msgspec.structs.replace(problem, causal=causal, seqlen_q=4096, seqlen_kv=4096)
        default = a_config(long)
        assert (default.num_consumer_groups, default.p_stages) == (3, tiles)
        assert FAMILY.space(long, H200).contains(default)
    assert (a_config(problem).num_consumer_groups, a_config(problem).p_stages) == (2, 0)


def test_tile_order_is_searched_where_tiles_differ() -> None:
    def orders(causal: Causal = Causal.BOTTOM_RIGHT, **changes: int) -> int:
        problem = msgspec.structs.replace(a_problem(causal=causal), **changes)
        return len({config.order for config in sampled_configs(problem, 60)})

    assert orders() == orders(window_left=900) == orders(chunk=256) == 3
    assert orders(causal=Causal.NONE, window_left=100) == 1
    assert a_config(a_problem(causal=Causal.BOTTOM_RIGHT, window_left=900)).order is Order.LPT


def test_pack_gqa_is_searched_where_queries_or_keys_are_few() -> None:
    def packs(problem: Problem) -> set[int]:
        return {config.pack_gqa for config in sampled_configs(problem, 60)}

    assert packs(a_problem(64, kv_heads=1, seqlen_q=16)) == {1, 2, 4, 8}
    window = a_problem(64, kv_heads=1, causal=Causal.BOTTOM_RIGHT, window_left=127)
    assert packs(window) == {1, 2, 4, 8}
    assert (a_config(window).pack_gqa, a_config(window).block_n) == (8, 64)
    # Three heads fill three quarters of a pack of four.
    assert packs(a_problem(64, heads=6, kv_heads=2, seqlen_q=16)) == {1, 2, 4}
    for problem in (
        a_problem(64, seqlen_q=16),
        a_problem(64, kv_heads=1),
        a_problem(64, kv_heads=1, causal=Causal.BOTTOM_RIGHT, window_left=500),
        a_problem(64, kv_heads=1, seqlen_q=16, dtype=Dtype.E4M3),
    ):
        assert packs(problem) == {1}


def dims_of(dtype: Dtype) -> range:
    return range(32, 257, 16) if dtype is Dtype.E4M3 else range(16, 257, 8)


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, Dtype.E4M3])
def test_head_dims_up_to_256_are_supported(dtype: Dtype) -> None:
    for head_dim in dims_of(dtype):
        for value_head_dim in {head_dim, 64, 128, 256}:
            assert FAMILY.supports(a_problem(head_dim, value_head_dim, dtype=dtype), H200) is None


@pytest.mark.parametrize("columns", [64, 128])
def test_wide_outputs_of_eight_bit_caches_are_stored_in_halves(columns: int) -> None:
    problem = a_problem(columns, page_size=16, kv_dtype=KvDtype.E4M3)
    config = a_config(problem)
    assert FAMILY.space(problem, H200).contains(config)
    assert config.split_epilogue is (columns == 128)


def test_conversion_of_caches_takes_time() -> None:
    # Chunks of prompts on an H200: 655 TFLOP/s with pages of 16 in bf16, and 523 in e4m3.
    shape = {"heads": 32, "kv_heads": 8, "batch": 16, "seqlen_q": 512, "seqlen_kv": 4608, "packed": 8192}
    plain = a_problem(causal=Causal.BOTTOM_RIGHT, page_size=16, **shape)
    stored = msgspec.structs.replace(plain, kv_dtype=KvDtype.E4M3)
    times = [FAMILY.makespan_ms(problem, a_config(problem), H200) for problem in (plain, stored)]
    assert times[1] / times[0] == pytest.approx(655 / 523, rel=0.05)


def launches(kernel: Kernel) -> dict[str, ast.Call]:
    """Returns the launches in the stand-alone function of a source, by the names of the kernels."""
    body = ast.parse(kernel.source).body
    (wrapper,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == "attention")
    return {
        ast.unparse(node.func.value): node
        for node in ast.walk(wrapper)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }


@pytest.mark.parametrize("size", [64, 128])
def test_a_kernel_of_block_masks_passes_all_its_workspaces(size: int) -> None:
    problem = a_problem(128, block_mask=size, block_lists=BlockLists.HEAD)
    kernel = render(FAMILY, problem, FAMILY.default(problem, H200), Specialization())
    assert "*scratch" in [ast.unparse(argument) for argument in launches(kernel)[kernel.entry].args]


@pytest.mark.parametrize(
    "lists", [{"bias": Bias.ADDITIVE}, {"bias": Bias.BOOLEAN}, {"block_mask": 128}], ids=str
)
def test_exported_kernels_launch_steps_with_their_warps(lists: dict[str, Any]) -> None:
    problem = a_problem(128, **lists)
    kernel = render(FAMILY, problem, FAMILY.default(problem, H200), Specialization())
    calls = launches(kernel)
    assert set(calls) == {part.entry for part in kernel.parts}
    for part in kernel.parts:
        (warps,) = (keyword.value for keyword in calls[part.entry].keywords if keyword.arg == "num_warps")
        assert ast.literal_eval(warps) == part.options.num_warps


SERVED = [name for name in TUNED if tuned(name).seqlen_q > 2]
MASKS = [name for name in SERVED if tuned(name).bias is not Bias.NONE]
CPU = torch.device("cpu")
# Most pairs of a query and a key in problems that are computed on the CPU.
SMALL = 2**17


@pytest.mark.parametrize("name", SERVED)
def test_hopper_computes_the_problem_with_its_default(name: str) -> None:
    problem = tuned(name)
    config = a_config(problem)
    assert unsupported_reason(FAMILY, problem, H200, Specialization(lse=True)) is None
    assert FAMILY.space(problem, H200).admits(config)
    assert sram_bytes(problem, config) + SPARE_BYTES <= H200.sram_per_block
    assert [case.problem.features for case in main_cases(problem)] == [problem.features] * 2


@pytest.mark.parametrize(("name", "schedule"), list(itertools.product(BLOCKS, SCHEDULES)))
def test_schedules_of_block_masks_are_in_the_space(name: str, schedule: str) -> None:
    problem = tuned(name)
    config = scheduled(problem, H200, schedule)
    assert FAMILY.space(problem, H200).admits(config)
    assert sram_bytes(problem, config) + SPARE_BYTES <= H200.sram_per_block
    assert has_one_list(problem, config) is (schedule != "own lists")
    assert config.dynamic_schedule is (schedule == "dynamic")


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_full_empty_and_partial_tiles(name: str) -> None:
    problem = msgspec.structs.replace(tuned(name), heads=1, kv_heads=1, batch=1)
    config = a_config(problem)
    block = main_cases(problem)[0].block
    generator = torch.Generator().manual_seed(1)
    bias = make_side(Probe.RANDOM, problem, equal_lengths(problem), block, generator).bias
    assert bias is not None
    is_boolean = problem.bias is Bias.BOOLEAN
    hidden, is_free = (~bias, bias) if is_boolean else (bias == -torch.inf, bias == 0)

    def tiles(elements: torch.Tensor) -> torch.Tensor:
        """Whether all elements of each whole tile of a group are set."""
        rows, columns = config.rows_per_group, config.block_n
        of_rows = elements[0, 0].unfold(0, rows, rows)
        return of_rows.unfold(1, columns, columns).flatten(2).all(-1)

    is_empty, is_full = tiles(hidden), tiles(is_free)
    assert is_empty.any()
    assert is_full.any()
    assert not (is_empty | is_full).all()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_rows_of_empty_lists_have_no_output(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_inputs, "EMPTY_LISTS", share)
    problem = tuned("small blocks")
    checked = 0
    for case in companions(problem, a_config(problem), Level.QUICK, reduced=False):
        if case.problem.seqlen_q * case.problem.seqlen_kv > SMALL:
            continue
        checked += 1
        ready = prepare(case, Alignment.SIXTEEN, CPU, 1)
        counts = ready.side.block_counts
        assert counts is not None
        assert bool((counts == 0).any())
        assert bool(ready.expected.out.isfinite().all())
        if share == 1.0:
            assert not counts.any()
            assert not ready.expected.out.any()
            assert bool((ready.expected.lse == -torch.inf).all())
    assert checked
