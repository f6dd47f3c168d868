"""Tests of the argument checks in rendered wrappers."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.expressions.nodes import NO_FUNCTIONS, Functions, Op
from flashtune.core.features.functions import integers_of
from flashtune.core.features.records import TABLES, BlockLists
from flashtune.core.kernel import Alignment
from flashtune.launch.compilation import load_module
from flashtune.request.functions.tracing import TABLE_DTYPES
from flashtune.templates import registry
from flashtune.templates.registry import family_names, template_hash
from flashtune.templates.rendering import CHECKS
from tests.support.golden_kernels import COMBINATIONS, kernel_of
from tests.templates.conftest import ReadBy
from tests.templates.test_golden import rendered_kernel

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_KV, PAGES, TABLE_WIDTH = 2, 4, 2, 32, 64, 6, 4
Call = dict[str, Any]
Change = Callable[[Call], object]


@functools.cache
def wrapper_of(name: str) -> Callable[..., Any]:
    module = load_module(rendered_kernel(name))
    wrapper: Callable[..., Any] = getattr(module, "attention_backward", None) or module.attention
    return wrapper


def captured_values(functions: Functions) -> Call:
    """Returns captured tensors and numbers of functions."""
    dtypes = {own: dtype for dtype, own in TABLE_DTYPES.items()}
    tables = {
        name: torch.zeros((HEADS,) * table.dimensions, dtype=dtypes[table.dtype])
        for name, table in zip(TABLES, functions.tables, strict=False)
    }
    integers = integers_of([0] * functions.count(Op.INT_NUMBER), [*tables.values()])
    return {
        "function_ints": torch.tensor(integers or [0], dtype=torch.int32),
        "function_floats": torch.zeros(functions.count(Op.FLOAT_NUMBER)),
        **tables,
    }


def call_of(name: str) -> Call:
    """Returns tensors on the CPU that the wrapper of a golden kernel takes."""
    combination = COMBINATIONS[name]
    width, value_width = combination.widths
    asked = combination.features
    dtype = DTYPES[combination.dtype]
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
        "tree": torch.zeros(BATCH, SEQLEN_Q, SEQLEN_Q, dtype=torch.bool),
        "prefix": torch.zeros(BATCH, dtype=torch.int32),
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts * (SEQLEN_KV // SEQLEN_Q),
        "seqlens_kv": torch.full((BATCH,), 16, dtype=torch.int32),
        "block_table": torch.zeros(BATCH, TABLE_WIDTH, dtype=torch.int32),
        "block_counts": torch.zeros(BATCH, listed, 1, dtype=torch.int32),
        "block_indices": torch.zeros(BATCH, listed, 1, 2, dtype=torch.int32),
        "full_counts": torch.zeros(BATCH, listed, 1, dtype=torch.int32),
        **captured_values(asked.get("functions", NO_FUNCTIONS)),
        "seed": torch.zeros(1, dtype=torch.int64),
        "softcap": 30.0,
        "dropout": 0.1,
        "scale": None,
    }
    return {parameter: offered[parameter] for parameter in inspect.signature(wrapper_of(name)).parameters}


def moved(tensor: Tensor) -> Tensor:
    """Returns the tensor's numbers from the second element of its memory on."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape)


def spread(tensor: Tensor, dimension: int, stride: int) -> Tensor:
    """Returns a tensor of the same shape with another stride, without memory behind it."""
    strides = [*tensor.stride()]
    strides[dimension] = stride
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def wrong_strides(tensor: Tensor) -> Tensor:
    """Returns every second element of a tensor of twice the last dimension."""
    wider = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    return wider[..., ::2]


def odd_rows(tensor: Tensor) -> Tensor:
    """Returns rows of one element more than the head dim."""
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


@functools.cache
def tensors_of(name: str) -> tuple[str, ...]:
    """Returns the names of the tensors that a wrapper takes, without captured tensors of functions."""
    tensors = [argument for argument, value in call_of(name).items() if isinstance(value, Tensor)]
    return tuple(argument for argument in tensors if not argument.startswith("table_"))


def captured_of(name: str) -> list[str]:
    return [argument for argument in call_of(name) if argument.startswith("table_")]


def large_tensors_of(name: str) -> list[str]:
    return [tensor for tensor in tensors_of(name) if tensor in ("q", "k", "v", "out", "dout")]


EVERY = pytest.mark.parametrize("name", COMBINATIONS)
EVERY_ALIGNED = pytest.mark.parametrize(
    "name",
    [name for name, case in COMBINATIONS.items() if case.specialization.alignment is not Alignment.ANY],
)


@pytest.mark.slow
@EVERY
def test_other_dtype_is_refused(name: str) -> None:
    for tensor in tensors_of(name):
        expected = call_of(name)[tensor].dtype
        refused(
            name,
            put(tensor, lambda x: x.to(torch.float64)),
            rf"^{tensor} has dtype torch.float64, expected {expected}$",
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if captured_of(name)])
def test_other_captured_tensors_are_refused(name: str) -> None:
    for tensor in captured_of(name):
        message = rf"^{tensor} is torch.* of \d dimensions, expected torch.* of \d$"
        refused(name, put(tensor, lambda x: x.to(torch.float64)), message)
        refused(name, put(tensor, lambda x: x[..., None]), message)
        refused(name, put(tensor, lambda x: x.to("meta")), message)


@pytest.mark.slow
@EVERY
def test_other_device_is_refused(name: str) -> None:
    for tensor in tensors_of(name):
        message = rf"^{tensor} is on meta, expected cpu"
        if tensor == "q":
            message = r"^k is on cpu, expected meta, the device of q$"
        refused(name, put(tensor, lambda x: x.to("meta")), message)


@pytest.mark.slow
@EVERY
def test_other_last_size_is_refused(name: str) -> None:
    """Head dims among them. The first of `cu_seqlens_q` decides how many sequences others must describe."""
    for tensor in tensors_of(name):
        if tensor in ("block_table", "block_indices"):
            # Their last size is any.
            refused(
                name, put(tensor, lambda x: x[:1]), rf"^{tensor} has shape \(1, .*\), expected \(2, .*\)$"
            )
        elif tensor == "cu_seqlens_q":
            refused(
                name, put(tensor, wider), r"^(k_scale|slopes|cu_seqlens_kv|seqlens_kv|cu_seqlens_q) has shape"
            )
        else:
            refused(name, put(tensor, wider), rf"^{tensor} has shape \(.*\), expected \(.*\)$")


@pytest.mark.slow
@EVERY
def test_other_numbers_of_dimensions_are_refused(name: str) -> None:
    for tensor in large_tensors_of(name):
        refused(name, put(tensor, lambda x: x[0]), rf"^{tensor} has 3 dimensions, expected 4$")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_kv_heads_that_do_not_divide_heads_are_refused(name: str) -> None:
    def change(call: Call) -> None:
        for tensor in ("k", "v"):
            call[tensor] = call[tensor][:, :1].expand(-1, 3, -1, -1)

    refused(name, change, r"^k has 3 heads, expected (1|a divisor of the 4 heads of q)$")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in COMBINATIONS if not COMBINATIONS[name].features.get("page_size")]
)
def test_unequal_batches_are_refused(name: str) -> None:
    def change(call: Call) -> None:
        for tensor in ("k", "v"):
            call[tensor] = torch.cat([call[tensor].view(torch.uint8)] * 2).view(call[tensor].dtype)

    refused(name, change, r"^k has shape \(\d, .*\), expected \(\d, .*\)$")


@pytest.mark.slow
@EVERY
def test_a_last_dimension_that_is_not_contiguous_is_refused(name: str) -> None:
    for tensor in tensors_of(name):
        # A dimension of one element is contiguous by any stride.
        if "scale" not in tensor and tensor not in ("seed", "block_counts", "full_counts"):
            message = rf"^{tensor} has strides \(.*\), expected 1 for the last dimension$"
            refused(name, put(tensor, wrong_strides), message)


def latent(tensor: str, made: Callable[[Tensor], Tensor]) -> Change:
    """Changes a tensor of a kernel for latent keys, whose values are columns of the keys."""

    def change(call: Call) -> None:
        changed = "q" if tensor == "q" else "k"
        call[changed] = made(call[changed])
        call["v"] = call["k"][..., : call["v"].shape[-1]]

    return change


def of_layout(name: str, tensor: str, made: Callable[[Tensor], Tensor]) -> tuple[str, Change]:
    """Returns the tensor that the check names, and the change of a tensor."""
    if not COMBINATIONS[name].features.get("mla"):
        return tensor, put(tensor, made)
    return ("q" if tensor == "q" else "k"), latent(tensor, made)


@pytest.mark.slow
@EVERY_ALIGNED
def test_strides_that_break_the_assumed_alignment_are_refused(name: str) -> None:
    for tensor in large_tensors_of(name):
        named, change = of_layout(name, tensor, odd_rows)
        message = rf"^{named} has strides \(.*\), expected multiples of (4|8|16) before the last$"
        refused(name, change, message)


@pytest.mark.slow
@EVERY_ALIGNED
def test_addresses_not_aligned_to_16_bytes_are_refused(name: str) -> None:
    for tensor in large_tensors_of(name):
        named, change = of_layout(name, tensor, moved)
        refused(name, change, rf"^{named} has the address \d+, expected a multiple of 16$")


def far(tensor: str, dimension: int, stride: int, *, is_latent: bool = False) -> Change:
    """Moves all tensors to the meta device and spreads one of them."""

    def change(call: Call) -> None:
        call.update({key: value.to("meta") for key, value in call.items() if isinstance(value, Tensor)})
        call[tensor] = spread(call[tensor], dimension, stride)
        if is_latent:
            call["v"] = call["k"][..., : call["v"].shape[-1]]

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # The copy engine addresses the tensors of the others.
    [
        name
        for name, case in COMBINATIONS.items()
        if case.family not in ("forward_hopper", "decode_latent_hopper")
    ],
)
def test_offsets_beyond_32_bits_are_refused(name: str) -> None:
    """Tensors without memory, which all lie on one device."""
    for tensor in large_tensors_of(name):
        is_latent = bool(COMBINATIONS[name].features.get("mla"))
        named, dimension, stride = ("k", 2, 2**26) if is_latent and tensor != "q" else (tensor, 1, 2**31)
        change = far(named, dimension, stride, is_latent=is_latent)
        refused(name, change, rf"^{named} spans \d+ elements, expected fewer than 2\*\*31$")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if COMBINATIONS[name].features.get("bias")])
def test_a_bias_beyond_32_bits_is_refused(name: str) -> None:
    message = r"^bias spans \d+ elements in one batch, expected fewer than 2\*\*31"
    refused(name, far("bias", 1, 2**31), message)


@pytest.mark.slow
@EVERY
def test_non_contiguous_extra_inputs_are_refused(name: str) -> None:
    is_quantized = "e4m3_d128" in name and not COMBINATIONS[name].features.get("kv_dtype")
    for tensor in tensors_of(name):
        if tensor in ("lse", "dlse") or (is_quantized and tensor not in ("q", "k", "v")):
            refused(
                name,
                put(tensor, lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]),
                rf"^{tensor} has strides \(.*\), expected a contiguous tensor$",
            )


@pytest.mark.parametrize("name", [name for name in COMBINATIONS if COMBINATIONS[name].features.get("mla")])
def test_separate_values_of_latent_keys_are_refused(name: str) -> None:
    refused(name, put("v", torch.clone), r"^v is a tensor of its own, expected the first 512 columns of k$")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in COMBINATIONS
        if not COMBINATIONS[name].family.endswith(("outer", "masked", "kv", "split", "fused"))
    ],
)
def test_gluon_kernels_refuse_cpu_tensors(name: str) -> None:
    refused(name, lambda call: None, r"^q is on cpu, expected a GPU$")


@pytest.mark.slow
def test_checks_do_not_affect_versions_and_digests(read_by: ReadBy) -> None:
    # A kernel of each family.
    names = {case.family: name for name, case in COMBINATIONS.items()}.values()
    before = {name: kernel_of(name) for name in names}
    versions = {name: template_hash(name) for name in family_names()}
    read = registry._read

    def changed(name: str) -> str:
        return read(name).replace("expected", "wanted") if name == CHECKS else read(name)

    read_by(changed)
    after = {name: kernel_of(name) for name in names}
    assert {name: template_hash(name) for name in family_names()} == versions
    for name in names:
        assert after[name].digest == before[name].digest
        assert len(re.findall("wanted", after[name].source)) > 5
