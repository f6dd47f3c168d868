"""Tests of the split-KV family without a GPU: plans, defaults, spaces, compilation and SRAM model."""

import math
import re
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.exhaustive.inner_loop import read_loop
from flashtune.core.config import LaunchOptions
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, KvDtype, KvScale
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.templates.decode_split_kv.space import DecodeConfig, group_rows
from flashtune.templates.rendering import render
from tests.mutants.core import Mutant, broken, rendered
from tests.mutants.portable import decode_scores
from tests.mutants.serving_size import USUAL
from tests.problems.decode import A100, FAMILY, H200, LATENT, a_config, a_problem, meta
from tests.problems.function_cases import FUNCTIONS

KNOWN = "decode_split_kv takes"
LISTED: dict[str, Any] = {
    "causal": Causal.NONE,
    "functions": FUNCTIONS["window"],
    "block_mask": 128,
    "block_lists": BlockLists.GROUP,
}


def test_launch_plan_of_split_keys() -> None:
    problem = a_problem(batch=3)
    kernel = render(FAMILY, problem, a_config(), Specialization())
    module = load_module(kernel)
    q = out = meta(3, 32, 2, 128)
    k = v = meta(3, 8, 500, 128)
    grid, workspaces, integers = module.launch_plan(q, k, v, out)
    assert grid == (3 * 8 * 4,)
    assert workspaces == ((4, 3 * 32 * 2, 128), (4, 3 * 32 * 2))
    assert integers[-6:] == (32, 4, 96, 2, 500, 4)
    last_grid, last_integers = module.epilogue_plan(q, k, v, out)
    assert last_grid == (3 * 32 * 2, 1)
    assert last_integers == (32 * 2 * 128, 2 * 128, 128, 32, 2, 192, 4)
    assert kernel.epilogue is not None
    assert len(kernel.epilogue.arguments) == 4 + len(last_integers)
    assert len(kernel.arguments) == 5 + len(workspaces) + 1 + len(integers)


def test_launch_plan_of_packed_pages() -> None:
    problem = a_problem(page_size=16, packed=1, batch=5)
    kernel = render(FAMILY, problem, a_config(num_splits=1), Specialization(lse=True))
    assert kernel.epilogue is None
    q = out = meta(1, 32, 9, 128)
    k = v = meta(70, 8, 16, 128)
    starts, lengths, table = (meta(*shape, dtype=torch.int32) for shape in ((6,), (5,), (5, 40)))
    grid, workspaces, integers = load_module(kernel).launch_plan(q, k, v, out, starts, lengths, table)
    assert grid == ((9 * 4 // 16 + 5) * 8,)
    assert workspaces == ()
    assert integers[12:] == (40, 32, 4, 32, 9, 640, 5)
    assert kernel.side == ("cu_seqlens_q", "seqlens_kv", "block_table")


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 16),
        ({"seqlen_kv": 131072}, 16),
        ({"batch": 16}, 1),
        ({"batch": 128, "heads": 64}, 1),
        ({"batch": 16, "kv_heads": 1}, 8),
        ({"heads": 128, "batch": 64, "seqlen_kv": 4096, **LATENT}, 1),
        ({"seqlen_kv": 100}, 1),
    ],
)
def test_defaults_fill_the_gpu_once(changes: dict[str, Any], splits: int) -> None:
    problem = a_problem(**changes)
    config = FAMILY.default(problem, H200)
    assert isinstance(config, DecodeConfig)
    assert config.num_splits == splits
    tiles = math.ceil(group_rows(problem) / config.block_m) * problem.batch * problem.kv_heads
    assert tiles * splits <= H200.sm_count or splits == 1
    assert FAMILY.space(problem, H200).contains(config)


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({"seqlen_kv": 65536, "page_size": 16}, (64, 8, 3, 32)),
        ({"batch": 16, "page_size": 16}, (64, 8, 3, 2)),
        ({"batch": 64, "seqlen_kv": 4096, "page_size": 64}, (64, 4, 4, 1)),
        ({"batch": 64, "seqlen_kv": 4096}, (128, 4, 3, 1)),
    ],
)
def test_defaults_of_pages(changes: dict[str, Any], tile: tuple[int, int, int, int]) -> None:
    config = FAMILY.default(a_problem(**changes), H200)
    assert isinstance(config, DecodeConfig)
    assert (config.block_n, config.num_warps, config.num_stages, config.num_splits) == tile


def test_other_splits_are_in_the_space_and_differ_in_makespan() -> None:
    problem = a_problem()
    space = FAMILY.space(problem, H200)
    default = FAMILY.default(problem, H200)
    others = list(FAMILY.schedule_variants(problem, default, H200))
    assert default in others
    assert all(space.contains(other) for other in others)
    spans = {config: FAMILY.makespan_ms(problem, config, H200) for config in others}
    assert min(spans, key=lambda config: spans[config]) == default
    alone = msgspec.structs.replace(default, num_splits=1, early_combine=False)
    assert spans[alone] > 5 * spans[default]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seqlen_q": 17, "batch": 132}, "up to 16 queries"),
        ({"dtype": Dtype.E4M3}, "no queries in e4m3"),
        ({"head_dim": 300, "value_head_dim": 128}, "head dims up to 256"),
        ({"packed": 4, "bias": Bias.ADDITIVE}, "no bias over packed"),
        ({"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}, "pages alone"),
        ({**LATENT, "value_head_dim": 500}, "a power of two"),
        ({"block_mask": 128, "causal": Causal.NONE}, "block masks with functions"),
        ({**LISTED, "block_lists": BlockLists.HEAD}, "lists that the heads of a KV head share"),
        ({**LISTED, "seqlen_q": 129}, "queries of one block"),
        ({"functions": FUNCTIONS["alibi"]}, "functions with block masks, or with causal masks"),
    ],
)
def test_unsupported_problems(changes: dict[str, Any], reason: str) -> None:
    said = FAMILY.supports(a_problem(**changes), H200)
    assert said is not None
    assert said.startswith(KNOWN)
    assert reason in said


def test_e4m3_requires_gpu_support() -> None:
    stored = a_problem(kv_dtype=KvDtype.E4M3)
    assert FAMILY.supports(stored, H200) is None
    assert FAMILY.supports(stored, A100) is not None
    assert FAMILY.supports(a_problem(kv_dtype=KvDtype.INT8), A100) is None


def test_options_without_early_launch_omit_the_field() -> None:
    assert msgspec.json.encode(LaunchOptions(4, 2)) == b'{"num_warps":4,"num_stages":2,"max_registers":0}'
    early = LaunchOptions(4, 2, early=True)
    assert msgspec.json.decode(msgspec.json.encode(early), type=LaunchOptions) == early


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "wide": ({"head_dim": 256, "value_head_dim": 256}, {"num_stages": 2}),
    "split_head_dim": ({"head_dim": 96, "value_head_dim": 80}, {"split_head_dim": True}),
    "several queries": ({"seqlen_q": 8, "kv_heads": 4}, {"block_m": 64}),
    "pages": ({"page_size": 16}, {}),
    "packed": ({"page_size": 64, "packed": 9}, {}),
    "masks": ({"window_left": 99, "sink_tokens": 4, "prefix": True, "bias": Bias.BOOLEAN}, {}),
    "scores": ({"softcap": True, "alibi": True, "bias": Bias.ADDITIVE, "sinks": True, "chunk": 128}, {}),
    "int8": ({"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD}, {}),
    "int8 pages": ({"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE, "page_size": 16}, {}),
    "fp32": ({"dtype": Dtype.FP32}, {"block_n": 32, "num_stages": 2}),
    "functions": (LISTED, {}),
    "functions of pages": ({"page_size": 16, "packed": 9, "functions": FUNCTIONS["capped window"]}, {}),
    "functions of int8 pages": (
        {
            "kv_dtype": KvDtype.INT8,
            "kv_scale": KvScale.PAGE,
            "page_size": 16,
            "functions": FUNCTIONS["alibi"],
        },
        {},
    ),
    "latent": ({**LATENT, "page_size": 64}, {"block_n": 32, "num_stages": 2, "num_warps": 8}),
}
HOPPER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "early": ({}, {"early_combine": True}),
    "early start": ({}, {"early_combine": True, "early_start": True}),
    "early start, one part": ({"page_size": 16}, {"num_splits": 1, "early_start": True}),
    "early start, packed": (
        {"page_size": 64, "packed": 9, "sinks": True},
        {"early_combine": True, "early_start": True},
    ),
    "e4m3": ({"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD}, {}),
    "e4m3 pages": ({"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "page_size": 128}, {}),
    "latent e4m3": ({**LATENT, "kv_dtype": KvDtype.E4M3}, {"block_m": 64, "num_warps": 8, "num_stages": 2}),
}


def test_kernels_without_wait_are_not_launched_early() -> None:
    """A combining kernel that starts early and does not wait could read partial results too early."""
    for dtype in (Dtype.BF16, Dtype.FP32):
        kernel = render(FAMILY, a_problem(dtype=dtype), a_config(early_combine=True), Specialization())
        _, combining = kernel.parts
        waits = "gdc_wait" in kernel.source
        assert waits is (dtype is Dtype.BF16)
        assert waits is (combining.options.early is True)


def is_ordered(ptx: str) -> bool:
    """Returns whether a kernel that starts early waits once, before it reads or writes device memory."""
    waits = [wait.start() for wait in re.finditer(r"griddepcontrol\.wait", ptx)]
    first = re.search(r"\b(ld\.global|st\.global|cp\.async\.c|red\.|atom\.)", ptx)
    return first is not None and len(waits) == 1 and waits[0] < first.start()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", decode_scores.early(USUAL), ids=lambda mutant: mutant.name)
def test_mutants_that_do_not_wait_are_found_in_ptx(mutant: Mutant) -> None:
    for kernel, ordered in ((rendered(mutant.subject), True), (broken(mutant), False)):
        parts = kernel.parts if kernel.options.early is True else kernel.parts[1:]
        assert all(is_ordered(compile_kernel(part, H200).asm["ptx"]) for part in parts) is ordered


# Of these, kernels that may assume nothing of their tensors too.
ANYWHERE = ("plain", "int8 pages", "fp32")
BOTH = [(name, target) for name in CASES for target in ("h200", "a100")]


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "gpu"), [*BOTH, *((name, "h200") for name in HOPPER_CASES)])
def test_kernels_compile(name: str, gpu: str) -> None:
    changes, values = {**CASES, **HOPPER_CASES}[name]
    target = find_target(gpu)
    problem, config = a_problem(**changes), a_config(**values)
    assert FAMILY.supports(problem, target) is None
    unaligned = [Specialization(Alignment.ANY, 64)] if name in ANYWHERE else []
    for specialization in (Specialization(lse=True), *unaligned):
        kernel = render(FAMILY, problem, config, specialization)
        binary = compile_kernel(kernel, target)
        items = FAMILY.sram_items(problem, config, target, specialization)
        assert sum(item.bytes for item in items) <= binary.metadata.shared
        assert binary.metadata.launch_pdl is config.early_start
        assert not config.early_start or is_ordered(binary.asm["ptx"])
        steps = kernel.parts[1:]
        assert len(steps) == (config.num_splits > 1)
        for step in steps:
            combining = compile_kernel(step, target)
            assert not config.early_combine or is_ordered(combining.asm["ptx"])
            assert combining.metadata.launch_pdl is config.early_combine
            assert ("griddepcontrol.wait" in combining.asm["ptx"]) is config.early_combine


def test_mla_products_use_wgmma() -> None:
    """One tile of values and a tile of the other columns, each in SRAM once, for both products."""
    problem = a_problem(heads=128, **LATENT)
    config = a_config(block_m=64, num_warps=8, num_stages=2, num_splits=1)
    binary = compile_kernel(render(FAMILY, problem, config, Specialization()), H200)
    assert "wgmma" in binary.asm["ptx"]
    tile = 64 * 576 * 2
    assert binary.metadata.shared == 3 * tile <= H200.sram_per_block


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KvDtype))
def test_eight_bits_need_half_the_sram(kind: KvDtype) -> None:
    """No copy of widened values: three programs fit a multiprocessor where two of 16 bits do not."""
    problem = a_problem(kv_dtype=kind, kv_scale=KvScale.HEAD)
    config = a_config(block_n=128, num_splits=1)
    kernel = render(FAMILY, problem, config, Specialization())
    binary = compile_kernel(kernel, H200)
    in_flight = 2 * 128 * (128 + 128)
    assert in_flight <= binary.metadata.shared <= in_flight + 16 * 1024
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in binary.asm["ptx"]
    loop = read_loop(binary.asm["cubin"])
    assert loop is not None
    # One conversion, or two steps of arithmetic, for two numbers of a thread's 256, and what weights take.
    named = "F2FP" if kind is KvDtype.E4M3 else "HADD2"
    assert 128 <= loop.instructions[named] <= 128 + 16


@pytest.mark.parametrize(
    ("changes", "config", "alignment", "expected"),
    [
        ({}, {}, Alignment.SIXTEEN, True),
        ({}, {}, Alignment.EIGHT, True),
        ({}, {}, Alignment.ANY, False),
        ({}, {"num_warps": 8}, Alignment.SIXTEEN, True),
        ({}, {"block_m": 64}, Alignment.SIXTEEN, False),
        ({"head_dim": 64, "value_head_dim": 64}, {"num_warps": 8}, Alignment.SIXTEEN, False),
        ({"head_dim": 32, "value_head_dim": 32}, {"num_warps": 2}, Alignment.SIXTEEN, False),
        ({"head_dim": 96, "value_head_dim": 96}, {"split_head_dim": True}, Alignment.SIXTEEN, False),
        ({"head_dim": 127, "value_head_dim": 128}, {}, Alignment.SIXTEEN, False),
        ({"dtype": Dtype.FP32}, {"block_n": 32}, Alignment.SIXTEEN, False),
        (LATENT, {"block_m": 64}, Alignment.SIXTEEN, True),
    ],
)
def test_caches_that_are_read_in_pairs(
    changes: dict[str, Any], config: dict[str, Any], alignment: Alignment, expected: bool
) -> None:
    problem = a_problem(kv_dtype=KvDtype.E4M3, **changes)
    kernel = render(FAMILY, problem, a_config(**config), Specialization(alignment))
    assert ("PAIR" in kernel.source) is expected
