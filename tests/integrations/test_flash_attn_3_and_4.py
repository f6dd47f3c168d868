"""Tests of the functions of flash_attn 3 and 4 that version 2 does not have, against loops in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.integrations.flash_attn import UnsupportedError, flash_attn_3, flash_attn_4
from tests.integrations.test_flash_attn_2 import batch_of, close, numbers, starts
from tests.support.flash_attn_reference import Rule, one_sequence

pytestmark = pytest.mark.slow

version_3: Any = flash_attn_3
version_4: Any = flash_attn_4
# Tokens of three sequences in memory, and how many of them count.
ROOM_Q, USED_Q = (4, 2, 5), (3, 0, 5)
ROOM_K, USED_K = (6, 3, 4), (5, 3, 0)


def int32(values: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"attention_chunk": 3, "causal": True}, Rule(causal=True, chunk=3)),
        ({"attention_chunk": 2}, Rule(chunk=2)),
        ({"window_size": (2, 1), "num_splits": 3, "pack_gqa": True, "sm_margin": 8}, Rule(left=2, right=1)),
    ],
)
@pytest.mark.parametrize("width", [16, 300])
def test_version_3_has_chunks_and_wide_values(options: dict[str, Any], rule: Rule, width: int) -> None:
    own = [numbers(2, 4, 4, 8), numbers(2, 6, 2, 8), numbers(2, 6, 2, width)]
    theirs = [tensor.clone().requires_grad_() for tensor in own]
    own = [tensor.requires_grad_() for tensor in own]
    results = version_3.flash_attn_func(*own, **options, return_attn_probs=True)
    expected, lse = batch_of(*theirs, rule)
    assert close(results[0], expected)
    assert close(results[1], lse.detach())
    dout = numbers(*expected.shape)
    gradients = torch.autograd.grad(results[0], own, dout)
    wanted = torch.autograd.grad(expected, theirs, dout)
    assert all(close(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))


def test_queries_and_values_in_one_tensor_of_version_3() -> None:
    qkv = numbers(2, 4, 8, 8)
    q, k, v = qkv.split([4, 2, 2], 2)
    expected = version_3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(version_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), expected)
    five = numbers(2, 4, 3, 2, 8)
    expected = version_3.flash_attn_func(*five.unbind(2))
    assert torch.equal(version_3.flash_attn_qkvpacked_func(five), expected)


@pytest.mark.parametrize("is_packed_q", [False, True])
@pytest.mark.parametrize("is_packed_k", [False, True])
@pytest.mark.parametrize("counts_q", [False, True])
@pytest.mark.parametrize("counts_k", [False, True])
@pytest.mark.parametrize(
    ("is_version_4", "window"),
    [
        (False, None),
        (False, (2, 1)),
        (True, None),
        (True, (None, -1)),
        (True, (-1, 3)),
        (True, (2, None)),
    ],
)
def test_sequences_of_which_a_part_counts(
    is_packed_q: bool,
    is_packed_k: bool,
    counts_q: bool,
    counts_k: bool,
    is_version_4: bool,
    window: tuple[int | None, int | None] | None,
) -> None:
    rule = Rule(causal=window is None, left=window and window[0], right=window and window[1])
    room_q = ROOM_Q if is_packed_q else (5, 5, 5)
    room_k = ROOM_K if is_packed_k else (6, 6, 6)
    used_q, used_k = (USED_Q if counts_q else room_q), (USED_K if counts_k else room_k)
    inputs = [
        numbers(sum(room_q), 4, 8).requires_grad_(),
        numbers(sum(room_k), 2, 8).requires_grad_(),
        numbers(sum(room_k), 2, 8, seed=1).requires_grad_(),
    ]
    q, k, v = inputs
    if not is_packed_q:
        q = q.unflatten(0, (3, 5))
    if not is_packed_k:
        k, v = k.unflatten(0, (3, 6)), v.unflatten(0, (3, 6))
    lengths: dict[str, Any] = {
        "cu_seqlens_q": starts(room_q) if is_packed_q else None,
        "cu_seqlens_k": starts(room_k) if is_packed_k else None,
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "seqused_q": int32(used_q) if counts_q else None,
        "seqused_k": int32(used_k) if counts_k else None,
        "causal": rule.causal,
    }
    if is_version_4:
        out, lse = version_4.flash_attn_varlen_func(
            q, k, v, **lengths, window_size=window or (None, None), return_lse=True
        )
    else:
        size = window or (-1, -1)
        out, lse = version_3.flash_attn_varlen_func(
            q, k, v, **lengths, window_size=size, return_attn_probs=True
        )
    theirs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outs, sums = [], []
    parts = zip(theirs[0].split(room_q), theirs[1].split(room_k), theirs[2].split(room_k), strict=True)
    for b, (own_q, own_k, own_v) in enumerate(parts):
        own, own_lse = one_sequence(own_q[: used_q[b]], own_k[: used_k[b]], own_v[: used_k[b]], rule)
        rest = room_q[b] - used_q[b]
        outs.append(torch.cat([own, own.new_zeros(rest, 4, 8)]))
        sums.append(torch.cat([own_lse, own_lse.new_full((4, rest), -torch.inf)], 1))
    expected, expected_lse = torch.cat(outs), torch.cat(sums, 1)
    if not is_packed_q:
        expected = expected.unflatten(0, (3, 5))
        expected_lse = expected_lse.unflatten(1, (3, 5)).transpose(0, 1)
    assert close(out, expected)
    counting = expected_lse > -torch.inf
    assert lse is not None
    assert close(lse[counting], expected_lse[counting])
    dout = numbers(*out.shape, seed=3)
    gradients = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(expected, theirs, dout)
    assert all(close(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_version_4_has_sinks_of_any_type_and_gradients_of_the_log_sum_exp(dtype: torch.dtype) -> None:
    sinks = numbers(4).to(dtype)
    q, k = numbers(2, 3, 4, 8), numbers(2, 5, 2, 8)
    own = [tensor.clone().requires_grad_() for tensor in (q, k, k, sinks)]
    theirs = [tensor.clone().requires_grad_() for tensor in (q, k, k, sinks)]
    out, lse = version_4.flash_attn_func(
        *own[:3], learnable_sink=own[3], window_size=(1, 0), softcap=2.0, return_lse=True
    )
    expected, expected_lse = batch_of(*theirs[:3], Rule(left=1, right=0, softcap=2.0, sinks=theirs[3]))
    assert close(out, expected)
    assert lse is not None
    assert close(lse, expected_lse)
    weights = numbers(*out.shape), numbers(*lse.shape)
    gradients = torch.autograd.grad((out, lse), own, weights)
    wanted = torch.autograd.grad((expected, expected_lse), theirs, weights)
    assert gradients[3].dtype is dtype
    rounding = torch.finfo(dtype).eps
    assert all(
        close(gradient, other, 1e-6) for gradient, other in zip(gradients[:3], wanted[:3], strict=True)
    )
    assert torch.allclose(gradients[3], wanted[3], rtol=rounding, atol=rounding)


def test_version_4_returns_a_log_sum_exp_only_if_something_needs_it() -> None:
    q = numbers(1, 2, 1, 8)
    assert version_4.flash_attn_func(q, q, q)[1] is None
    lse = version_4.flash_attn_func(q.clone().requires_grad_(), q, q)[1]
    assert lse is not None
    assert not lse.requires_grad


@pytest.mark.parametrize(
    ("causal", "window", "rule"),
    [
        (False, (0, -3), Rule()),
        (True, (-3, 5), Rule(causal=True)),
        (False, (None, 0), Rule(causal=True)),
        (False, (-2, 4), Rule(left=-2, right=4)),
    ],
)
def test_windows_of_version_4(causal: bool, window: tuple[int | None, int | None], rule: Rule) -> None:
    q, k = numbers(1, 5, 2, 8), numbers(1, 7, 2, 8)
    out, _ = version_4.flash_attn_func(q, k, k, causal=causal, window_size=window)
    assert close(out, batch_of(q, k, k, rule)[0])


def rows_with_values(q: Tensor, k: Tensor, v: Tensor, qv: Tensor, rule: Rule) -> Tensor:
    """Returns the attention of one sequence with scores q·k + qv·v."""
    scale = 1 / math.sqrt(q.shape[-1] + qv.shape[-1])
    joint_q, joint_k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    return one_sequence(joint_q, joint_k, v, rule._replace(scale=scale))[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [32, 512])
def test_products_of_queries_and_values_are_added_to_scores(causal: bool, width: int) -> None:
    q, k = numbers(2, 3, 4, 8).requires_grad_(), numbers(2, 5, 2, 8)
    v, qv = numbers(2, 5, 2, width), numbers(2, 3, 4, width)
    rule = Rule(causal=causal)
    expected = torch.stack(
        [rows_with_values(*parts, rule) for parts in zip(q.detach(), k, v, qv, strict=True)]
    )
    out = version_3.flash_attn_func(q, k, v, causal=causal, qv=qv)
    assert close(out.detach(), expected)
    with pytest.raises(UnsupportedError, match="no backward pass for qv"):
        out.sum().backward()
    lengths_q, lengths_k = (1, 2), (3, 4)
    own = [numbers(3, 4, 8), numbers(7, 2, 8), numbers(7, 2, width), numbers(3, 4, width)]
    packed = version_3.flash_attn_varlen_func(
        *own[:3], starts(lengths_q), starts(lengths_k), 2, 4, causal=causal, qv=own[3]
    )
    splits = [
        tensor.split(lengths)
        for tensor, lengths in zip(own, (lengths_q, lengths_k, lengths_k, lengths_q), strict=True)
    ]
    assert close(
        packed, torch.cat([rows_with_values(a, b, c, d, rule) for a, b, c, d in zip(*splits, strict=True)])
    )
    cached = version_3.flash_attn_with_kvcache(
        q.detach(), k, v, cache_seqlens=torch.tensor([4, 5], dtype=torch.int32), qv=qv, causal=causal
    )
    assert close(cached[1], expected[1])


@pytest.mark.parametrize("page", [1, 16, 96])
def test_pages_of_version_4(page: int) -> None:
    table = torch.randperm(6, generator=torch.Generator().manual_seed(0)).view(2, 3).int()
    k, v = numbers(6, page, 2, 8), numbers(6, page, 2, 8, seed=1)
    lengths = [page, 3 * page - 1]
    q = numbers(2, 2, 4, 8)
    sinks = numbers(4)
    out, _ = version_4.flash_attn_varlen_func(
        q, k, v, page_table=table, seqused_k=int32(lengths), causal=True, learnable_sink=sinks
    )
    rule = Rule(causal=True, sinks=sinks.float())
    rows = [(k[own.long()].flatten(0, 1), v[own.long()].flatten(0, 1)) for own in table]
    expected = [
        one_sequence(q[b], rows[b][0][:count], rows[b][1][:count], rule)[0] for b, count in enumerate(lengths)
    ]
    assert close(out, torch.stack(expected), 1e-6)
    full, _ = version_4.flash_attn_varlen_func(q, k, v, page_table=table)
    assert close(full[1], one_sequence(q[1], *rows[1], Rule())[0])


def test_parts_are_combined_also_where_they_have_no_keys() -> None:
    out, lse = numbers(3, 2, 4, 2, 8).float(), numbers(3, 2, 4, 2).float()
    lse[1, 0] = -torch.inf
    out[1, 0] = torch.nan
    lse[:, 1, 0] = -torch.inf
    weights = torch.softmax(lse.double(), 0).nan_to_num(0.0)
    expected = (weights[..., None] * out.double().nan_to_num(0.0)).sum(0)
    combined, combined_lse = version_3.flash_attn_combine(out, lse)
    assert torch.allclose(combined.double(), expected, atol=1e-6)
    assert torch.equal(combined_lse, torch.logsumexp(lse, 0))
    buffer = torch.empty_like(combined)
    result = version_4.flash_attn_combine(out, lse, out=buffer, return_lse=False)
    assert result[0] is buffer
    own_lse = torch.empty_like(combined_lse)
    version_4._flash_attn_fwd_combine(out, lse, buffer.zero_(), own_lse)
    assert torch.equal(buffer, combined)
    assert torch.equal(own_lse, combined_lse)
    assert result[1] is None
    assert version_3.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda q: version_4.flash_attn_func(q, q, q, score_mod=abs), "score_mod"),
        (lambda q: version_4.flash_attn_func(q, q, q, mask_mod=abs), "mask_mod"),
        (lambda q: version_4.flash_attn_varlen_func(q, q, q, gather_kv_indices=q), "gather_kv_indices"),
        (lambda q: version_4.flash_attn_func(None, None, q), "q or k is None"),
        (lambda q: version_4._flash_attn_fwd(q, q, q, block_sparse_tensors=q), "block_sparse_tensors"),
        (version_4._flash_attn_bwd_sparse_mla, "gather_kv_indices"),
        (
            lambda q: version_4._flash_attn_fwd_combine(q, q, q, semaphore_to_reset=q),
            "semaphore_to_reset",
        ),
        (lambda q: version_4._flash_attn_bwd(q, q, q, q, q, q, learnable_sink=q), "learnable_sink"),
    ],
)
def test_arguments_without_kernels_are_named(call: Callable[[Tensor], object], name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        call(numbers(1, 2, 2, 8))


def test_scheduler_metadata_is_empty_and_accepted() -> None:
    lengths = int32([3])
    metadata = version_3.get_scheduler_metadata(1, 1, 8, 2, 2, 8, lengths)
    cache = numbers(1, 8, 2, 8)
    out = version_3.flash_attn_with_kvcache(
        numbers(1, 1, 2, 8), cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata
    )
    assert out.shape == (1, 1, 2, 8)
    assert version_4.get_scheduler_metadata(1, 1, 2, 2, 8, 1).tile_count_semaphore is None


@pytest.mark.parametrize("window_size", [(3,), 3, ("a", 1), None])
def test_windows_that_are_no_pairs_of_numbers_are_refused(window_size: Any) -> None:
    q = torch.zeros(1, 8, 2, 64)
    for module in (flash_attn_3, flash_attn_4):
        with pytest.raises(ProblemError, match=r"^window_size cannot be .*: pass \(left, right\)"):
            module.flash_attn_func(q, q, q, window_size=window_size)
