"""Tests of the MLA Hopper family without a GPU: plans, unsupported problems, defaults, compilation."""

import re
from typing import Any

import pytest
import torch

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import PAGE_SIZES, Causal, Dtype, Feature, KvDtype
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.templates.decode_latent_hopper.space import LatentConfig, row_tiles
from flashtune.templates.family import unsupported_reason
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_resources
from tests.problems.decode import meta
from tests.problems.latent import FAMILY, H200, a_config, a_problem, kernel_of

A100, B200 = find_target("a100"), find_target("b200")
PLAIN = Specialization()


def test_launch_plan_of_pages_in_splits() -> None:
    problem = a_problem(page_size=64, seqlen_q=3, batch=5)
    kernel = kernel_of(problem, lse=True, queries=2, num_splits=4)
    module = load_module(kernel)
    q, out, cache = meta(5, 128, 3, 576), meta(5, 128, 3, 512), meta(70, 1, 64, 576)
    side = meta(5, dtype=torch.int32), meta(5, 64, dtype=torch.int32)
    tensors = (q, cache, cache[..., :512], out, *side)
    grid, workspaces, integers = module.launch_plan(*tensors)
    # Four tiles of 32 heads, two of two queries.
    assert grid == (4 * 2 * 5 * 4,)
    assert workspaces == ((4, 5 * 128 * 3, 512), (4, 5 * 128 * 3))
    assert integers == (128, 640, 3, 4096, 64, 4)
    last_grid, last_integers = module.epilogue_plan(*tensors)
    assert last_grid == (5 * 128 * 3, 1)
    assert last_integers == (128 * 3 * 512, 3 * 512, 512, 128, 3, 5 * 128 * 3, 4)
    assert kernel.side == ("seqlens_kv", "block_table")
    assert kernel.epilogue is not None
    assert len(kernel.epilogue.arguments) == 4 + len(last_integers)
    # Four descriptors, lse, scale.
    assert len(kernel.arguments) == 4 + 1 + len(side) + len(workspaces) + 1 + len(integers)
    assert [len(parts) for parts in module.descriptors(*tensors[:4])] == [2, 2, 0, 0]


def test_single_split_writes_the_output() -> None:
    problem = a_problem(heads=16)
    kernel = kernel_of(problem, queries=1)
    q, out, k = meta(64, 16, 1, 576), meta(64, 16, 1, 512), meta(64, 1, 4096, 576)
    module = load_module(kernel)
    grid, workspaces, integers = module.launch_plan(q, k, k[..., :512], out)
    assert (grid, workspaces, integers) == ((64,), (), (16, 1024, 1, 4096))
    assert kernel.epilogue is None
    assert kernel.takes_descriptors
    assert kernel.side == ()
    made = module.descriptors(q, k, k[..., :512], out)
    assert [[tensor.block_shape for tensor in parts] for parts in made] == [
        [[1, 64, 1, 256], [1, 64, 1, 64]],
        [[1, 1, 1, 64, 256], [1, 1, 1, 64, 64]],
        [],
        [[1, 64, 1, 256]],
    ]
    boxes = [str(descriptor.block_shape) for parts in made for descriptor in parts]
    assert [argument.type.split("[", 1)[1].split("]")[0] for argument in kernel.arguments[:5]] == [
        box.strip("[]") for box in boxes
    ]


@pytest.mark.parametrize("batch", [1, 7])
def test_descriptor_covers_rows_of_a_page(batch: int) -> None:
    """The first two coordinates cancel, in bytes, whatever the strides."""
    k = meta(batch, 1, 200, 640)[..., :576]
    q = meta(batch, 128, 1, 576)
    made = load_module(kernel_of(a_problem())).descriptors(q, k, k[..., :512], q[..., :512])[1][0]
    far, used, page, row = 2**30, 129, batch - 1, 77
    places = (far, used, page, far - used + row, 3)
    offset = sum(at * stride for at, stride in zip(places, made.strides, strict=True))
    assert offset * 2 % 2**64 == (page * k.stride(0) + row * k.stride(2) + 3) * 2
    assert places[3] < made.shape[3] <= places[3] - row + used
    assert all(stride * 2 % 16 == 0 and stride * 2 < 2**40 for stride in made.strides[:-1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mla": False, "head_dim": 128, "value_head_dim": 128}, "columns of the keys"),
        ({"dtype": Dtype.FP32}, "bf16 and fp16"),
        ({"kv_heads": 2}, "one KV head"),
        ({"value_head_dim": 500}, "powers of two"),
        ({"head_dim": 640}, "by 16, 32 or 64 columns"),
        ({"head_dim": 496}, "16, 32 or 64 columns"),
    ],
)
def test_unsupported_problems(changes: dict[str, Any], reason: str) -> None:
    said = FAMILY.supports(a_problem(**changes), H200)
    assert said is not None
    assert said.startswith("decode_latent_hopper takes")
    assert reason in said


def test_features_and_targets() -> None:
    assert FAMILY.features == {Feature.MLA, Feature.KV_LENGTHS, Feature.PAGES}
    assert not FAMILY.interpreted
    taken: list[dict[str, Any]] = [{}, {"kv_lengths": True}, {"page_size": 256, "dtype": Dtype.FP16}]
    for changes in (*taken, *({"page_size": keys} for keys in PAGE_SIZES if keys >= 16)):
        assert unsupported_reason(FAMILY, a_problem(**changes), H200, PLAIN) is None
        assert (
            unsupported_reason(FAMILY, a_problem(**changes), H200, Specialization(Alignment.ANY)) is not None
        )
    assert unsupported_reason(FAMILY, a_problem(softcap=True), H200, PLAIN) is not None
    assert unsupported_reason(FAMILY, a_problem(kv_dtype=KvDtype.E4M3), H200, PLAIN) is not None
    for target in (A100, B200):
        assert "sm_90 alone" in str(FAMILY.supports(a_problem(), target))


@pytest.mark.parametrize(
    ("changes", "splits"),
    [({}, 1), ({"batch": 1}, 32), ({"batch": 16}, 4), ({"heads": 16}, 2), ({"seqlen_kv": 60, "batch": 1}, 1)],
)
def test_defaults_fill_the_gpu(changes: dict[str, Any], splits: int) -> None:
    problem = a_problem(**changes)
    config = FAMILY.default(problem, H200)
    assert isinstance(config, LatentConfig)
    assert config.num_splits == splits
    space = FAMILY.space(problem, H200)
    assert space.contains(config)
    others = list(FAMILY.schedule_variants(problem, config, H200))
    assert config in others
    assert all(space.contains(other) for other in others)


def test_tiles_of_few_heads_contain_several_queries() -> None:
    problem = a_problem(heads=16, seqlen_q=4)
    config = FAMILY.default(problem, H200)
    assert isinstance(config, LatentConfig)
    assert config.queries == 4
    assert row_tiles(problem, config) == 1


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one part": ({}, {"overlap_pv": True}),
    "lengths in parts": ({"kv_lengths": True}, {"num_splits": 3}),
    "pages": ({"page_size": 64, "causal": Causal.NONE}, {}),
    "pages of 128": ({"page_size": 128, "dtype": Dtype.FP16, "seqlen_q": 4}, {"queries": 4, "num_splits": 2}),
    "pages of 16": ({"page_size": 16}, {"overlap_pv": True}),
    "pages of 16 in parts": ({"page_size": 16, "seqlen_q": 2}, {"queries": 2, "num_splits": 3}),
    "pages of 32": ({"page_size": 32, "dtype": Dtype.FP16}, {"overlap_pv": True, "num_splits": 2}),
    "narrow pages of 16": ({"page_size": 16, "value_head_dim": 256, "head_dim": 272}, {"num_stages": 4}),
    "three stages": ({"value_head_dim": 256, "head_dim": 288}, {"num_stages": 3}),
}


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels_fit_sram_and_registers(name: str) -> None:
    changes, values = COMPILED[name]
    problem, config = a_problem(**changes), a_config(**values)
    kernel = render(FAMILY, problem, config, Specialization(lse=True))
    resources = read_resources(kernel, H200)
    asked = sum(item.bytes for item in FAMILY.sram_items(problem, config, H200, PLAIN))
    # The compiler adds the exchange between roles and aligns what it allocates.
    assert 0 <= resources.sram_bytes - asked <= 1024
    assert resources.sram_bytes <= H200.sram_per_block
    assert resources.warps == 12
    assert not resources.serialized_wgmma
    assert resources.spill_bytes == 0
    for step in kernel.parts[1:]:
        assert compile_kernel(step, H200).metadata.shared <= H200.sram_per_block


@pytest.mark.parametrize("splits", [2, 32, 66, 128])
def test_combine_kernel_does_not_spill(splits: int) -> None:
    """All columns of all parts at once did not, from 65 parts on."""
    _, combining = kernel_of(a_problem(batch=1), lse=True, num_splits=splits).parts
    resources = read_resources(combining, H200)
    assert resources.spill_bytes == 0
    assert resources.registers < 128


def test_small_pages_are_copied_one_by_one() -> None:
    kernel = kernel_of(a_problem(page_size=16))
    q, out, cache = meta(64, 128, 1, 576), meta(64, 128, 1, 512), meta(70, 1, 16, 576)
    made = load_module(kernel).descriptors(q, cache, cache[..., :512], out)[1]
    boxes = [[1, 1, 1, 16, 256], [1, 1, 1, 16, 64]]
    assert [descriptor.block_shape for descriptor in made] == boxes
    assert [argument.type.split("[", 1)[1].split("]")[0] for argument in kernel.arguments[2:4]] == [
        str(box).strip("[]") for box in boxes
    ]


def shared_addresses(ptx: str) -> list[tuple[str, int, int]]:
    """Of each copy of keys: the register its address counts from, bytes from there, and the first column."""
    values: dict[str, tuple[str, int]] = {}

    def value_of(operand: str) -> tuple[str, int]:
        return values.get(operand, (operand, 0)) if operand.startswith("%") else ("", int(operand))

    copies = []
    for line in ptx.splitlines():
        if match := re.match(r"\s*add\.s32\s+(%\w+), (%\w+), (-?\d+);", line):
            root, offset = value_of(match[2])
            values[match[1]] = root, offset + int(match[3])
        elif match := re.match(r"\s*mov\.b32\s+(%\w+), (%\w+|-?\d+);", line):
            values[match[1]] = value_of(match[2])
        elif match := re.search(r"bulk\.tensor\.5d.*bytes \[(%\w+)\], \[%\w+, \{(%\w+),", line):
            copies.append((*value_of(match[1]), value_of(match[2])[1]))
    return copies


@pytest.mark.slow
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("rest", [64, 16])
def test_small_pages_have_the_layout_of_the_products(page: int, rest: int) -> None:
    """As the rows of a tile of which 128 bytes of all rows lie side by side, and then the next 128 bytes."""
    problem = a_problem(page_size=page, head_dim=512 + rest)
    copies = shared_addresses(compile_kernel(kernel_of(problem, overlap_pv=True), H200).asm["ptx"])
    pieces = 64 // page
    assert len(copies) == pieces * (4 + 1 + 4)
    for start, width in ((0, 256), (512, rest), (256, 256)):
        chunk = min(width, 64)
        columns = range(start, start + width, chunk)
        mine, copies = copies[: pieces * len(columns)], copies[pieces * len(columns) :]
        assert len({root for root, _, _ in mine}) == 1
        first = mine[0][1]
        assert [(offset - first, column) for _, offset, column in mine] == [
            ((piece * page + 64 * number) * chunk * 2, column)
            for piece in range(pieces)
            for number, column in enumerate(columns)
        ]
