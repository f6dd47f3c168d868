"""Tests of the masked family: unsupported problems, rendered and compiled kernels of each feature."""

import functools
from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, Feature, KvDtype, KvScale, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.templates.common.args.feature_context import feature_values
from flashtune.templates.common.args.problem_context import FARTHEST
from flashtune.templates.common.model.splits import TILES_PER_SM, count_tiles
from flashtune.templates.forward_masked.space import MaskedConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.problems.function_cases import FUNCTIONS

H100, A100 = find_target("h100"), find_target("a100")
FAMILY = find_family("forward_masked")
PAGES = {"page_size": 16, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}
# One way to ask for each feature.
ASKED: dict[str, dict[str, Any]] = {
    "window": {"window_left": 256, "window_right": 16},
    "first_tokens": {"window_left": 256, "sink_tokens": 4},
    "chunk": {"chunk": 128},
    "prefix": {"prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "blocks": {"block_mask": 64},
    "block_groups": {"block_mask": 128, "block_lists": BlockLists.GROUP},
    "functions": {"functions": FUNCTIONS["window"], "causal": Causal.NONE},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "packed": {"packed": 1024},
    "lengths": {"kv_lengths": True},
    "pages": {"page_size": 64},
    "tree": {"tree": True},
    "int8": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "int8_pages": PAGES,
    "e4m3": {"kv_dtype": KvDtype.E4M3},
}
CONFIG = MaskedConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
a_problem = functools.partial(
    testing.problem, "heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,batch=2"
)


def rendered(problem: Problem, config: MaskedConfig = CONFIG, lse: bool = True) -> Kernel:
    return render(FAMILY, problem, config, Specialization(lse=lse))


def test_all_features_but_latent_and_deterministic_are_supported() -> None:
    # Only gradients have a deterministic variant.
    assert not FAMILY.features & {Feature.MLA, Feature.DETERMINISTIC}
    asked = {feature for changes in ASKED.values() for feature in a_problem(**changes).features}
    assert asked == FAMILY.features
    for changes in ASKED.values():
        assert FAMILY.supports(a_problem(**changes), H100) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "is for masks"),
        ({"sinks": True, "value_head_dim": 512}, "head dims up to 256"),
        ({"window_left": 1, "dtype": Dtype.E4M3}, "no queries in e4m3"),
        ({"packed": 9, "bias": Bias.BOOLEAN}, "no bias over packed sequences"),
        ({"block_mask": 64, "packed": 9}, "no block mask over packed sequences or pages"),
        (
            ASKED["functions"] | {"sinks": True},
            "functions with block masks, or with causal masks of pages, alone",
        ),
        ({"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}, "scales of pages for keys in pages alone"),
    ],
)
def test_unsupported_problems_have_reasons(changes: dict[str, Any], words: str) -> None:
    assert words in (FAMILY.supports(a_problem(**changes), H100) or "")


def test_e4m3_keys_require_gpu_support() -> None:
    problem = a_problem(kv_dtype=KvDtype.E4M3)
    assert "from sm_89 on" in (FAMILY.supports(problem, A100) or "")
    assert FAMILY.supports(problem, find_target("l4")) is None
    assert FAMILY.supports(a_problem(kv_dtype=KvDtype.INT8), A100) is None


def test_bounds_beyond_every_length_fit_int32() -> None:
    problem = a_problem(window_left=2**31 - 1, chunk=2**31 - 1, sink_tokens=2**31 - 1)
    features = feature_values(problem)
    bounds = features["window_left"], features["window_right"], features["chunk"]
    assert bounds == (FARTHEST, -1, FARTHEST)
    assert 2 * FARTHEST + 1 < 2**31


def test_integer_arguments_of_a_launch_match_the_kernel() -> None:
    problem = a_problem(packed=100, alibi=True, **PAGES)
    kernel = rendered(problem)
    q, k = torch.empty(1, 4, 100, 64, dtype=torch.bfloat16), torch.empty(9, 2, 16, 64, dtype=torch.int8)
    scales = torch.empty(9, 2)
    starts = torch.tensor([0, 30, 30, 100], dtype=torch.int32)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 7, dtype=torch.int32)
    side = (scales, scales, torch.empty(3, 4), starts, lengths, table)
    grid, workspaces, integers = load_module(kernel).launch_plan(q, k, k, q, *side)
    assert (grid, workspaces) == (((100 // 64 + 3) * 4,), ())
    names = [argument.name for argument in kernel.arguments][-len(integers) :]
    values = dict(zip(names, integers, strict=True))
    assert names[0] == "stride_qb"
    assert (values["stride_kb"], values["stride_ks"], values["stride_k_scale_p"]) == (2048, 64, 2)
    assert (values["stride_slopes_b"], values["stride_table"], values["sequences"]) == (4, 7, 3)
    assert (values["seqlen_q"], values["group_size"]) == (100, 2)


def test_a_bias_has_wide_strides() -> None:
    kernel = rendered(a_problem(bias=Bias.ADDITIVE))
    types = {argument.name: argument.type for argument in kernel.arguments}
    assert types["stride_bias_b"] == "i64"
    assert (types["bias"], types["stride_qb"]) == ("*bf16", "i32")
    assert {a.name: a.type for a in rendered(a_problem(bias=Bias.BOOLEAN)).arguments}["bias"] == "*i1"


COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("window", {"window_left": 256, "sink_tokens": 4, "sinks": True}),
    ("scores", {"softcap": True, "alibi": True, "bias": Bias.ADDITIVE}),
    ("boolean", {"bias": Bias.BOOLEAN, "causal": Causal.NONE}),
    ("packed", {"packed": 512, "chunk": 128}),
    ("pages", {"page_size": 16, "packed": 512, "prefix": True}),
    ("one_page", {"page_size": 256, "dtype": Dtype.FP16}),
    ("int8", {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD, "kv_lengths": True}),
    ("int8_pages", {**PAGES, "dtype": Dtype.FP16}),
    ("functions_of_pages", {"page_size": 16, "packed": 512, "functions": FUNCTIONS["capped window"]}),
    ("e4m3_pages", {"page_size": 64, "kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE}),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [case[1] for case in COMPILED], ids=[case[0] for case in COMPILED])
def test_compiled_sram_on_hopper_matches_the_model(changes: dict[str, Any]) -> None:
    problem = a_problem(**changes)
    for config in (CONFIG, msgspec.structs.replace(CONFIG, num_stages=3, split_masked_loop=False)):
        binary = compile_kernel(rendered(problem, config), H100)
        assert "wgmma" in binary.asm["ptx"]
        items = FAMILY.sram_items(problem, config, H100, Specialization(lse=True))
        assert 0.7 * binary.metadata.shared < sum(item.bytes for item in items) <= binary.metadata.shared


@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
@pytest.mark.parametrize(
    ("features", "are_split"),
    [
        ({}, True),
        ({"packed": 100, "page_size": 16}, True),
        ({"window_left": 8191, "sinks": True}, True),
        ({"kv_dtype": KvDtype.INT8, "kv_lengths": True}, True),
        ({"window_left": 100}, False),
        ({"seqlen_q": 16}, False),
        ({"batch": 64, "kv_heads": 4}, False),
        ({"bias": Bias.ADDITIVE}, False),
        ({"block_mask": 64}, False),
        ({"functions": FUNCTIONS["alibi"], "causal": Causal.NONE}, True),
        ({"functions": FUNCTIONS["window"], "packed": 100, "page_size": 16}, True),
        ({"functions": FUNCTIONS["window"], "causal": Causal.NONE, "block_mask": 64}, False),
    ],
    ids=str,
)
def test_few_tiles_over_long_keys_are_split_by_default(
    target: str, features: dict[str, Any], are_split: bool
) -> None:
    fields = {"kv_heads": 1, "batch": 1, "seqlen_q": 100, "seqlen_kv": 65_536, **features}
    problem, gpu = a_problem(**fields), find_target(target)
    config = FAMILY.default(problem, gpu)
    assert isinstance(config, MaskedConfig)
    whole = msgspec.structs.replace(config, num_splits=1)
    assert (config.num_splits > 1) == are_split
    if are_split:
        assert FAMILY.supports(problem, gpu) is None
        assert FAMILY.space(problem, gpu).contains(config)
        tiles = count_tiles(problem, config.block_m, 1)
        assert gpu.sm_count // 4 < tiles * config.num_splits <= TILES_PER_SM * gpu.sm_count
        assert FAMILY.makespan_ms(problem, config, gpu) < 0.5 * FAMILY.makespan_ms(problem, whole, gpu)


@pytest.mark.tritons
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "a100", "l4"])
@pytest.mark.parametrize(
    "features",
    [
        {"window_left": 256, "sink_tokens": 4, "sinks": True, "kv_lengths": True},
        {"packed": 512, "page_size": 16},
        {"causal": Causal.NONE, "head_dim": 96, "value_head_dim": 80},
    ],
    ids=str,
)
def test_splits_are_compiled(target: str, features: dict[str, Any]) -> None:
    problem = a_problem(**features)
    config = msgspec.structs.replace(CONFIG, num_splits=12)
    kernel, gpu = rendered(problem, config), find_target(target)
    shared, combined = (compile_kernel(part, gpu).metadata.shared for part in kernel.parts)
    items = FAMILY.sram_items(problem, config, gpu, kernel.specialization)
    assert sum(item.bytes for item in items) <= shared <= gpu.sram_per_block
    assert combined < shared


def test_compiled_sram_on_ampere_and_in_float32_matches_the_model() -> None:
    misaligned = Specialization(Alignment.ANY, 64, True)
    for problem, specialization in (
        (a_problem(window_left=64, **PAGES), Specialization()),
        (a_problem(softcap=True, dtype=Dtype.FP32, head_dim=16, value_head_dim=16, packed=9), misaligned),
    ):
        config = msgspec.structs.replace(CONFIG, block_n=16)
        binary = compile_kernel(render(FAMILY, problem, config, specialization), A100)
        items = FAMILY.sram_items(problem, config, A100, specialization)
        assert sum(item.bytes for item in items) <= binary.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(
    ("changes", "split_masked_loop", "stages"),
    [
        ({}, True, 3),
        ({}, False, 3),
        ({"window_left": 99}, True, 3),
        ({"window_left": 99, "sink_tokens": 4}, True, 3),
        # Its one loop jumps from the first tokens to the window.
        ({"window_left": 99, "sink_tokens": 4}, False, 2),
    ],
)
def test_pipelined_blocks_with_paged_keys(
    page_size: int, changes: dict[str, Any], split_masked_loop: bool, stages: int
) -> None:
    problem = a_problem(page_size=page_size, head_dim=128, value_head_dim=128, **changes)
    config = msgspec.structs.replace(CONFIG, num_stages=3, split_masked_loop=split_masked_loop)
    shared = compile_kernel(rendered(problem, config), H100).metadata.shared
    queries, block = 64 * 128 * 2, 2 * 64 * 128 * 2
    assert queries + stages * block <= shared < queries + stages * block + 2048
