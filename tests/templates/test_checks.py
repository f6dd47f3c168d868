"""Tests of the argument checks in rendered wrappers."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.features.records import BlockLists
from flashtune.core.kernel import Alignment
from flashtune.launch.compilation import load_module
from flashtune.templates import registry, rendering
from flashtune.templates.registry import family_names, template_hash
from flashtune.templates.rendering import CHECKS
from tests.support.golden_kernels import COMBINATIONS, FEATURES, kernel_of

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_KV, PAGES, TABLE_WIDTH = 2, 4, 2, 32, 64, 6, 4
Call = dict[str, Any]
Change = Callable[[Call], object]


@functools.cache
def wrapper_of(name: str) -> Callable[..., Any]:
    module = load_module(kernel_of(name))
    found: Callable[..., Any] = getattr(module, "attention_backward", None) or module.attention
    return found


def call_of(name: str) -> Call:
    """Tensors on the CPU that the wrapper of a golden kernel takes."""
    _, dtype_name, (width, value_width), _, _, _ = COMBINATIONS[name]
    asked = FEATURES.get(name, {})
    dtype = DTYPES[dtype_name]
    page_size = asked.get("page_size", 0)
    kv_heads = 1 if asked.get("mla") else KV_HEADS
    batch = 1 if asked.get("packed") else BATCH
    listed = kv_heads if asked.get("block_lists") is BlockLists.GROUP else HEADS
    stored = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(str(asked.get("kv_dtype")), dtype)
    keys = (PAGES, kv_heads, page_size) if page_size else (batch, kv_heads, SEQLEN_KV)
    k = torch.zeros(*keys, width, dtype=stored)
    rows = (batch, HEADS, SEQLEN_Q)
    starts = torch.tensor([0, SEQLEN_Q // 2, SEQLEN_Q], dtype=torch.int32)
    places = PAGES if str(asked.get("kv_scale")) == "page" else BATCH
    offered: Call = {
        "q": torch.zeros(*rows, width, dtype=dtype),
        "k": k,
        "v": k[..., :value_width] if asked.get("mla") else torch.zeros(*keys, value_width, dtype=stored),
        "out": torch.zeros(*rows, value_width, dtype=dtype),
        "lse": torch.zeros(rows),
        "dout": torch.zeros(*rows, value_width, dtype=dtype),
        "dlse": torch.zeros(rows),
        "q_scale": torch.ones(BATCH, HEADS),
        "k_scale": torch.ones(places, kv_heads),
        "v_scale": torch.ones(places, kv_heads),
        "slopes": torch.zeros(BATCH, HEADS),
        "bias": torch.zeros(*rows, SEQLEN_KV, dtype=torch.bool if asked.get("bias") == "boolean" else dtype),
        "sinks": torch.zeros(HEADS),
        "prefix": torch.zeros(BATCH, dtype=torch.int32),
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts * (SEQLEN_KV // SEQLEN_Q),
        "seqlens_kv": torch.full((BATCH,), 16, dtype=torch.int32),
        "block_table": torch.zeros(BATCH, TABLE_WIDTH, dtype=torch.int32),
        "block_counts": torch.zeros(BATCH, listed, 1, dtype=torch.int32),
        "block_indices": torch.zeros(BATCH, listed, 1, 2, dtype=torch.int32),
        "seed": torch.zeros(1, dtype=torch.int64),
        "softcap": 30.0,
        "dropout": 0.1,
        "scale": None,
    }
    return {one: offered[one] for one in inspect.signature(wrapper_of(name)).parameters}


def moved(tensor: Tensor) -> Tensor:
    """The tensor's numbers from the second element of its memory on."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape)


def spread(tensor: Tensor, dimension: int, stride: int) -> Tensor:
    """A tensor of the same shape with another stride, without memory behind it."""
    strides = [*tensor.stride()]
    strides[dimension] = stride
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def wrong_strides(tensor: Tensor) -> Tensor:
    """Every second element of a tensor of twice the last dimension."""
    wider = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    return wider[..., ::2]


def odd_rows(tensor: Tensor) -> Tensor:
    """Rows of one element more than the head dim."""
    wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
    return wider[..., :-1]


def wider(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)


def refused(name: str, change: Change, message: str) -> None:
    call = call_of(name)
    change(call)
    with pytest.raises(ValueError, match=message) as caught:
        wrapper_of(name)(**call)
    assert "\n" not in str(caught.value)


def put(tensor: str, made: Callable[[Tensor], Tensor]) -> Change:
    return lambda call: call.update({tensor: made(call[tensor])})


TENSORS = [
    (name, tensor)
    for name in COMBINATIONS
    for tensor, value in call_of(name).items()
    if isinstance(value, Tensor)
]
LARGE = [(name, tensor) for name, tensor in TENSORS if tensor in ("q", "k", "v", "out", "dout")]
ALIGNED = [one for one in LARGE if COMBINATIONS[one[0]][5].alignment is not Alignment.ANY]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_other_dtype_is_refused(name: str, tensor: str) -> None:
    expected = call_of(name)[tensor].dtype
    refused(
        name,
        put(tensor, lambda one: one.to(torch.float64)),
        rf"^{tensor} has dtype torch.float64, expected {expected}$",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_other_device_is_refused(name: str, tensor: str) -> None:
    if tensor == "q":
        refused(
            name, put(tensor, lambda one: one.to("meta")), r"^k is on cpu, expected meta, the device of q$"
        )
    else:
        refused(name, put(tensor, lambda one: one.to("meta")), rf"^{tensor} is on meta, expected cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_other_last_size_is_refused(name: str, tensor: str) -> None:
    """Head dims among them. The first of `cu_seqlens_q` decides how many sequences others must describe."""
    if tensor in ("block_table", "block_indices"):
        # Their last size is any.
        refused(
            name, put(tensor, lambda one: one[:1]), rf"^{tensor} has shape \(1, .*\), expected \(2, .*\)$"
        )
    elif tensor == "cu_seqlens_q":
        refused(
            name, put(tensor, wider), r"^(k_scale|slopes|cu_seqlens_kv|seqlens_kv|cu_seqlens_q) has shape"
        )
    else:
        refused(name, put(tensor, wider), rf"^{tensor} has shape \(.*\), expected \(.*\)$")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), LARGE)
def test_other_numbers_of_dimensions_are_refused(name: str, tensor: str) -> None:
    refused(name, put(tensor, lambda one: one[0]), rf"^{tensor} has 3 dimensions, expected 4$")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_kv_heads_that_do_not_divide_heads_are_refused(name: str) -> None:
    def change(call: Call) -> None:
        for tensor in ("k", "v"):
            call[tensor] = call[tensor][:, :1].expand(-1, 3, -1, -1)

    refused(name, change, r"^k has 3 heads, expected (1|a divisor of the 4 heads of q)$")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in COMBINATIONS if not FEATURES.get(name, {}).get("page_size")]
)
def test_unequal_batches_are_refused(name: str) -> None:
    def change(call: Call) -> None:
        for tensor in ("k", "v"):
            call[tensor] = torch.cat([call[tensor].view(torch.uint8)] * 2).view(call[tensor].dtype)

    refused(name, change, r"^k has shape \(\d, .*\), expected \(\d, .*\)$")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), [one for one in TENSORS if "scale" not in one[1]])
def test_a_last_dimension_that_is_not_contiguous_is_refused(name: str, tensor: str) -> None:
    if tensor in ("seed", "block_counts"):
        pytest.skip("a dimension of one element is contiguous by any stride")
    refused(
        name, put(tensor, wrong_strides), rf"^{tensor} has strides \(.*\), expected 1 for the last dimension$"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), ALIGNED)
def test_strides_that_break_the_assumed_alignment_are_refused(name: str, tensor: str) -> None:
    message = rf"^{tensor} has strides \(.*\), expected multiples of (4|8|16) before the last$"
    if FEATURES.get(name, {}).get("mla"):

        def change(call: Call) -> None:
            call[tensor] = odd_rows(call[tensor])
            if tensor != "q":
                call["k"] = call["k"] if tensor == "k" else odd_rows(call["k"])
                call["v"] = call["k"][..., : call["v"].shape[-1]]

        refused(name, change, message.replace("^v", "^k"))
    else:
        refused(name, put(tensor, odd_rows), message)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), ALIGNED)
def test_addresses_not_aligned_to_16_bytes_are_refused(name: str, tensor: str) -> None:
    if FEATURES.get(name, {}).get("mla") and tensor != "q":

        def change(call: Call) -> None:
            call["k"] = moved(call["k"])
            call["v"] = call["k"][..., : call["v"].shape[-1]]

        refused(name, change, r"^k has the address \d+, expected a multiple of 16$")
    else:
        refused(name, put(tensor, moved), rf"^{tensor} has the address \d+, expected a multiple of 16$")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), LARGE)
def test_offsets_beyond_32_bits_are_refused(name: str, tensor: str) -> None:
    """Tensors without memory, which all lie on one device."""
    family = COMBINATIONS[name][0]
    if family in ("forward_hopper", "decode_latent_hopper"):
        pytest.skip("the copy engine addresses these tensors")

    def change(call: Call) -> None:
        for one, value in call.items():
            if isinstance(value, Tensor):
                call[one] = value.to("meta")
        call[tensor] = spread(call[tensor], 1, 2**31)
        if FEATURES.get(name, {}).get("mla"):
            if tensor != "q":
                call["k"] = spread(call["k"], 2, 2**26)
            call["v"] = call["k"][..., : call["v"].shape[-1]]

    named = "k" if FEATURES.get(name, {}).get("mla") and tensor != "q" else tensor
    refused(name, change, rf"^{named} spans \d+ elements, expected fewer than 2\*\*31$")


@pytest.mark.parametrize("name", [name for name, tensor in TENSORS if tensor == "bias"])
def test_a_bias_beyond_32_bits_is_refused(name: str) -> None:
    def change(call: Call) -> None:
        call.update({one: value.to("meta") for one, value in call.items() if isinstance(value, Tensor)})
        call["bias"] = spread(call["bias"], 1, 2**31)

    refused(name, change, r"^bias spans \d+ elements in one batch, expected fewer than 2\*\*31")


@pytest.mark.parametrize(
    ("name", "tensor"), [one for one in TENSORS if one[1] in ("lse", "dlse") or "e4m3_d128" in one[0]]
)
def test_non_contiguous_extra_inputs_are_refused(name: str, tensor: str) -> None:
    if tensor in ("q", "k", "v") or FEATURES.get(name, {}).get("kv_dtype"):
        pytest.skip("this tensor may have strides")

    def transposed(one: Tensor) -> Tensor:
        return torch.zeros(*one.shape[:-2], one.shape[-2], one.shape[-1] + 1)[..., :-1]

    refused(name, put(tensor, transposed), rf"^{tensor} has strides \(.*\), expected a contiguous tensor$")


@pytest.mark.parametrize("name", [name for name in COMBINATIONS if FEATURES.get(name, {}).get("mla")])
def test_separate_values_of_latent_keys_are_refused(name: str) -> None:
    refused(name, put("v", torch.clone), r"^v is a tensor of its own, expected the first 512 columns of k$")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in COMBINATIONS
        if not COMBINATIONS[name][0].endswith(("outer", "masked", "kv", "split", "fused"))
    ],
)
def test_gluon_kernels_refuse_cpu_tensors(name: str) -> None:
    refused(name, lambda call: None, r"^q is on cpu, expected a GPU$")


@pytest.mark.slow
def test_checks_do_not_affect_versions_and_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: kernel_of(name) for name in COMBINATIONS}
    versions = {name: template_hash(name) for name in family_names()}
    read = registry._read

    def changed(name: str) -> str:
        return read(name).replace("expected", "wanted") if name == CHECKS else read(name)

    monkeypatch.setattr(registry, "_read", changed)
    monkeypatch.setattr(rendering, "_read_template", changed)
    for cached in (template_hash, rendering._environment):
        cached.cache_clear()
    try:
        after = {name: kernel_of(name) for name in COMBINATIONS}
        assert {name: template_hash(name) for name in family_names()} == versions
    finally:
        monkeypatch.undo()
        for cached in (template_hash, rendering._environment):
            cached.cache_clear()
    for name in COMBINATIONS:
        assert after[name].digest == before[name].digest
        assert len(re.findall("wanted", after[name].source)) > 5
