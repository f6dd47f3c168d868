"""Tests of configs and of kernels: alignment, digests and steps."""

from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.config import Axis, Config, LaunchOptions, Space
from flashtune.core.kernel import Alignment, Argument, Kernel, Specialization, Step, specialization_of
from flashtune.core.problem import Dtype
from flashtune.core.target import TARGETS, Target
from flashtune.templates.forward_q_outer.space import Loads, QOuterConfig
from flashtune.templates.registry import families


def views(
    *, offset: int = 0, stride: int = 64, length: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    storage = torch.empty(offset + 2 * 4 * length * stride, dtype=torch.bfloat16)
    view = storage[offset:].view(2, 4, length, stride)[..., :32]
    return view, view, view, view


@pytest.mark.parametrize(
    ("offset", "stride", "alignment"),
    [(0, 64, 16), (0, 40, 8), (0, 36, 4), (0, 38, 2), (0, 37, 1), (1, 64, 1), (8, 64, 16)],
)
def test_alignment_class_follows_pointers_and_strides(offset: int, stride: int, alignment: int) -> None:
    assert specialization_of(views(offset=offset, stride=stride), lse=False).alignment == alignment


def test_expanded_rows_have_no_descriptor_alignment() -> None:
    row = torch.empty(2, 4, 1, 64, dtype=torch.bfloat16)
    repeated = row.expand(2, 4, 8, 64)
    assert specialization_of((row, repeated, repeated, row), lse=False).alignment is Alignment.ANY
    assert specialization_of((row, row, row, row), lse=False).alignment is Alignment.SIXTEEN


def test_offsets_beyond_31_bits_need_wide_indices() -> None:
    small = torch.empty(1, 1, 8, 32, device="meta")
    wide = torch.empty(1, 1, 2**31, 32, device="meta")[:, :, ::64]
    tensors = (small, small, small, small)
    assert _index_bits(tensors) == 32
    assert _index_bits((small, wide, small, small)) == 64


def _index_bits(tensors: tuple[torch.Tensor, ...]) -> int:
    return specialization_of(tensors, lse=False).index_bits


@pytest.mark.parametrize(
    ("alignment", "dtype", "taken"),
    [
        (Alignment.SIXTEEN, Dtype.BF16, True),
        (Alignment.EIGHT, Dtype.FP16, True),
        (Alignment.EIGHT, Dtype.FP32, True),
        (Alignment.ANY, Dtype.FP32, False),
        (Alignment.SIXTEEN, Dtype.E4M3, True),
        (Alignment.EIGHT, Dtype.E4M3, False),
    ],
)
def test_descriptors_need_strides_of_16_bytes(alignment: Alignment, dtype: Dtype, taken: bool) -> None:
    assert Specialization(alignment).takes_descriptors(dtype) is taken


KERNEL = Kernel(
    "family", "entry", "source", (Argument("q", "*bf16", 16),), LaunchOptions(4, 2), Specialization()
)
PROLOGUE = Step("transpose_values", (Argument("v", "*fp8e4nv"),), LaunchOptions(4, 1))


def test_the_digest_covers_source_specialisation_and_options() -> None:
    others = (
        msgspec.structs.replace(KERNEL, source="another"),
        msgspec.structs.replace(KERNEL, arguments=(Argument("q", "*bf16"),)),
        msgspec.structs.replace(KERNEL, options=LaunchOptions(4, 2, 128)),
        msgspec.structs.replace(KERNEL, specialization=Specialization(lse=True)),
        msgspec.structs.replace(KERNEL, prologue=PROLOGUE),
        msgspec.structs.replace(KERNEL, prologue=Step("other", PROLOGUE.arguments, PROLOGUE.options)),
    )
    digests = {KERNEL.digest, *(other.digest for other in others)}
    assert len(digests) == 1 + len(others)


def test_steps_are_in_launch_order() -> None:
    first, last = (Step(entry, PROLOGUE.arguments, PROLOGUE.options) for entry in ("first", "last"))
    prologue = msgspec.structs.replace(PROLOGUE, before=first)
    kernel = msgspec.structs.replace(KERNEL, prologue=prologue, epilogue=last)
    assert [step.entry for step in kernel.steps] == ["first", "transpose_values", "last"]
    assert [part.entry for part in kernel.parts] == ["entry", "first", "transpose_values", "last"]


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
