"""Tests of the modules that `patch` installs, of flash_attn's signatures, and of its helpers."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import pytest
import torch

from flashtune.integrations import flash_attn
from flashtune.integrations.flash_attn import (
    bert_padding,
    flash_attn_3,
    flash_attn_4,
    is_patched,
    patch,
    unpatch,
)
from flashtune.integrations.flash_attn.rotary import apply_rotary_emb
from tests.integrations.test_flash_attn_2 import close, numbers, starts
from tests.support.flash_attn_reference import rotated_by_pairs

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FP8 = "q_descale=None, k_descale=None, v_descale=None"
# The parameters of flash_attn 2.8.4 and of version 3, with their defaults.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
SIGNATURES_3 = {
    "flash_attn_func": (
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {FP8}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
        "return_attn_probs=False"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {FP8}, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, "
        f"{FP8}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        f"cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {FP8}, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
    ),
}
REST_4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
SIGNATURES_4 = {
    "flash_attn_func": (
        f"q, k, v, qv=None, gather_kv_indices=None, {REST_4}, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        f"{REST_4}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False"
    ),
}


@pytest.fixture
def patched() -> Iterator[None]:
    patch()
    yield
    unpatch()


def parameters(module: ModuleType, name: str) -> str:
    """Returns the parameters of a function without types."""
    listed = inspect.signature(getattr(module, name)).parameters.values()
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in listed)


@pytest.mark.parametrize(
    ("module", "table"),
    [(flash_attn, SIGNATURES), (flash_attn_3, SIGNATURES_3), (flash_attn_4, SIGNATURES_4)],
)
def test_signatures_are_those_of_flash_attn(module: ModuleType, table: dict[str, str]) -> None:
    assert {name: parameters(module, name) for name in table} == table


@pytest.mark.usefixtures("patched")
def test_patched_modules_have_the_names_that_other_libraries_import() -> None:
    names = {
        "flash_attn": tuple(SIGNATURES),
        "flash_attn.flash_attn_interface": (
            *SIGNATURES,
            "_flash_attn_forward",
            "_flash_attn_backward",
            "_flash_attn_varlen_forward",
            "_flash_attn_varlen_backward",
            "_wrapped_flash_attn_forward",
            "_get_block_size_n",
            "flash_attn_gpu",
            "USE_TRITON_ROCM",
        ),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "unpad_input", "index_put_first_axis"),
        "flash_attn.layers.rotary": ("apply_rotary_emb",),
        "flash_attn.cute": ("flash_attn_func", "flash_attn_varlen_func"),
        "flash_attn.cute.interface": ("_flash_attn_fwd", "_flash_attn_bwd", "get_scheduler_metadata"),
        "flash_attn_interface": (*SIGNATURES_3, "_flash_attn_forward", "_flash_attn_backward"),
        "flash_attn_3.flash_attn_interface": tuple(SIGNATURES_3),
    }
    for name, members in names.items():
        module = importlib.import_module(name)
        assert [member for member in members if not hasattr(module, member)] == []
        assert importlib.util.find_spec(name) is not None
    assert importlib.import_module("flash_attn").__version__ == metadata.version("flash_attn") == "2.8.4"
    assert metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert not list(metadata.distribution("flash-attn").files or ())
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.ops")


def test_modules_that_were_there_before_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.layers", "flash_attn.losses")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert not is_patched()
    patch()
    patch()
    assert is_patched()
    assert sys.modules["flash_attn"] is not theirs["flash_attn"]
    assert "flash_attn.losses" not in sys.modules
    unpatch()
    unpatch()
    assert not is_patched()
    assert {name: sys.modules.get(name) for name in theirs} == theirs
    assert "flash_attn.cute" not in sys.modules
    assert "flash_attn_interface" not in sys.modules
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_rotary_embedding_equals_rotation_pair_by_pair(interleaved: bool, is_packed: bool) -> None:
    angle = numbers(9, 3)
    cos, sin = angle.cos(), angle.sin()
    x = numbers(5, 2, 8).requires_grad_()
    lengths, offsets = (2, 3), (4, 1)
    tokens = x if is_packed else x.unflatten(0, (1, 5))
    out = apply_rotary_emb(
        tokens,
        cos,
        sin,
        interleaved,
        seqlen_offsets=torch.tensor(offsets) if is_packed else 4,
        cu_seqlens=starts(lengths) if is_packed else None,
    )
    positions = [4, 5, 1, 2, 3] if is_packed else [4, 5, 6, 7, 8]
    expected = torch.stack(
        [
            rotated_by_pairs(row, cos, sin, position, interleaved)
            for row, position in zip(x, positions, strict=True)
        ]
    )
    assert close(out.view_as(expected), expected)
    dout = numbers(5, 2, 8, seed=1)
    gradient = torch.autograd.grad(out, x, dout.view_as(out))[0]
    assert close(gradient, torch.autograd.grad(expected, x, dout)[0])


def test_rotary_embedding_in_place_and_after_the_last_position() -> None:
    angle = numbers(2, 4)
    x = numbers(1, 3, 2, 8)
    before = x.clone()
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), inplace=True)
    assert out.data_ptr() == x.data_ptr()
    assert torch.equal(x[:, 2], before[:, 2])
    assert not torch.equal(x[:, 1], before[:, 1])


def test_padding_and_packing_are_inverse() -> None:
    x = numbers(2, 4, 3).requires_grad_()
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
    rows, places, offsets, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x.flatten(0, 1)[[0, 2, 3, 6]])
    assert places.tolist() == [0, 2, 3, 6]
    assert offsets.tolist() == [0, 3, 4]
    assert offsets.dtype is torch.int32
    assert (longest, used.tolist()) == (3, [3, 1])
    back = bert_padding.pad_input(rows, places, 2, 4)
    assert torch.equal(back, x * mask[..., None])
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask[..., None].expand_as(x).double())
    unused = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
    kept = bert_padding.unpad_input(x, mask, unused)
    assert (kept[2].tolist(), kept[3], kept[4].tolist()) == ([0, 4, 5], 4, [3, 1])
    residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), places)
    assert torch.equal(residual[0], rows)
    assert not residual[1].requires_grad


def test_rows_with_several_sequences_are_packed() -> None:
    x = numbers(2, 5, 3)
    lengths = torch.tensor([[2, 1, 0, 0, 0], [4, 0, 0, 0, 0]])
    rows, places, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :3], x[1, :4]]))
    assert places.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert (offsets.tolist(), longest) == ([0, 2, 3, 7], 4)
