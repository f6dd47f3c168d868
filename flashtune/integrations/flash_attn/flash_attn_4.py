# ruff: noqa: ARG001 - The signatures are those of flash_attn.
"""The functions of flash_attn 4's module `flash_attn.cute`, with its signatures and semantics.

They return the output and the log-sum-exp, which is None if nothing needs it. Bounds of windows may be
negative. A window with a negative sum has no effect. Arguments that select schedules have no effect. Programs
and lists of blocks must be None. Backward passes of `qv` and pages raise `UnsupportedError`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.attend import Attended, combined, without_gradient
from flashtune.integrations.flash_attn.features import Descales, Features, UnsupportedError, read_bounds
from flashtune.integrations.flash_attn.flash_attn_3 import sequences_of
from flashtune.integrations.flash_attn.gradients import gradients
from flashtune.integrations.flash_attn.sequences import NO_BACKWARD, attend_cache, attend_sequences
from flashtune.integrations.flash_attn.token_rows import WHOLE, as_lengths

Window = tuple[int | None, int | None]
Output = tuple[Tensor, Tensor | None]
# Arguments that are programs or lists of blocks, for which flashtune has no kernels.
UNSUPPORTED = (
    "score_mod",
    "score_mod_bwd",
    "mask_mod",
    "aux_tensors",
    "aux_scalars",
    "block_sparse_tensors",
    "block_sparse_tensors_bwd",
    "gather_kv_indices",
)


class SchedulerMetadata(NamedTuple):
    """The result of `get_scheduler_metadata`, which has no effect."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Output:
    """Returns the attention of [batch, tokens, heads, width], and the log-sum-exp, as flash_attn 4's.

    The log-sum-exp has gradients with `return_lse` only.
    """
    _refuse(locals())
    features = read_window(
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks=learnable_sink,
        deterministic=deterministic,
        wants_lse=return_lse or _needs_grad(q, k, v, qv, learnable_sink),
    )
    return _output(attend_sequences(q, k, v, WHOLE, WHOLE, features, qv=qv), return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Output:
    """Returns the attention of sequences of different lengths, and the log-sum-exp, as flash_attn 4's.

    Without `cu_seqlens_q`, `q` is [batch, tokens, heads, width]. Keys are likewise, or pages with
    `page_table`. Queries that do not count, by `seqused_q`, get zeros. The log-sum-exp has gradients with
    `return_lse` only.
    """
    _refuse(locals())
    features = read_window(
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks=learnable_sink,
        deterministic=deterministic,
        wants_lse=return_lse or _needs_grad(q, k, v, qv, learnable_sink),
    )
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    result = _attended((q, k, v, qv), starts, longest, (seqused_q, seqused_k), page_table, features)
    return _output(result, return_lse)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Output:
    """Returns the attention over the keys of all parts, and its log-sum-exp if `return_lse` is set.

    Packed tokens are combined one by one, also those that do not count by `seqused`.
    """
    total, lse = combined(out_partial, lse_partial)
    result = total.to(out_dtype or out_partial.dtype) if out is None else out.copy_(total)
    return result, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadata:
    """Returns empty metadata, because flashtune's kernels take none."""
    return SchedulerMetadata(cu_total_m_blocks=torch.empty(0, dtype=torch.int32))


def _flash_attn_fwd_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    num_splits_dynamic_ptr: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    semaphore_to_reset: Tensor | None = None,
    *,
    _arch: int | None = None,
) -> None:
    """Writes the attention over the keys of all parts to `out`, and its log-sum-exp to `lse`."""
    if num_splits_dynamic_ptr is not None or semaphore_to_reset is not None:
        raise UnsupportedError(
            "num_splits_dynamic_ptr and semaphore_to_reset have no kernels: leave them out"
        )
    _, total_lse = flash_attn_combine(out_partial, lse_partial, out)
    if lse is not None and total_lse is not None:
        lse.copy_(total_lse)


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Returns the output, the log-sum-exp and twice None. It takes no part in autograd."""
    _refuse(others)
    features = read_window(
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        sinks=learnable_sink,
        descales=Descales(q_descale, k_descale, v_descale),
        wants_lse=return_lse or lse is not None or _needs_grad(q, k, v, qv, learnable_sink),
    )
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        result, result_lse = _attended(
            (q, k, v, qv), starts, longest, (seqused_q, seqused_k), page_table, features
        )
        if lse is not None and result_lse is not None:
            result_lse = lse.copy_(result_lse)
        return (result if out is None else out.copy_(result)), result_lse, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, written to dq, dk and dv where they are given."""
    _refuse(others)
    if learnable_sink is not None or dlse is not None:
        raise UnsupportedError("_flash_attn_bwd takes no learnable_sink and no dlse: use autograd")
    window = window_size_left, window_size_right
    features = read_window(softmax_scale, causal, window, softcap, deterministic=deterministic)
    queries = sequences_of(q, cu_seqlens_q, max_seqlen_q, seqused_q)
    keys = sequences_of(k, cu_seqlens_k, max_seqlen_k, seqused_k)
    return gradients(dout, q, k, v, out, lse, queries, keys, features, (dq, dk, dv))


def _flash_attn_bwd_sparse_mla(*arguments: Any, **options: Any) -> Any:
    """Raises an error."""
    raise UnsupportedError("gather_kv_indices has no kernels in flashtune: call flash_attn for sparse MLA")


def read_window(
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float | None, **others: Any
) -> Features:
    """Returns the options of a call of flash_attn 4, in which None means no bound."""
    left, right = read_bounds(window_size)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        left = right = None
    else:
        causal = right == 0
    return Features(
        scale=None if softmax_scale is None else float(softmax_scale),
        causal=causal,
        left=left,
        right=None if causal else right,
        softcap=float(softcap or 0.0),
        **others,
    )


def _attended(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    starts: tuple[Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    used: tuple[Tensor | None, Tensor | None],
    table: Tensor | None,
    features: Features,
) -> Attended:
    q, k, v, qv = tensors
    queries = sequences_of(q, starts[0], longest[0], used[0])
    if table is None:
        keys = sequences_of(k, starts[1], longest[1], used[1])
        return attend_sequences(q, k, v, queries, keys, features, qv=qv)
    cache = caches.cache_of(k, v, table, None, table.shape[0])
    lengths = used[1]
    if lengths is None and starts[1] is not None:
        lengths = as_lengths(starts[1])
    if lengths is None:
        bound = cache.capacity if longest[1] is None else min(longest[1], cache.capacity)
        lengths = torch.full((table.shape[0],), bound, dtype=torch.int32, device=q.device)
    out, lse = attend_cache(q, cache, lengths, queries, features, qv=qv)
    return without_gradient(NO_BACKWARD.format("page_table"), out, q, k, v, features.sinks), lse


def _output(result: Attended, has_gradients: bool) -> Output:
    out, lse = result
    return out, lse if lse is None or has_gradients else lse.detach()


def _needs_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse(arguments: dict[str, Any]) -> None:
    """Raises an error for arguments without kernels."""
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise UnsupportedError(f"{name} has no kernels in flashtune: leave it out, or call flash_attn")
    if arguments.get("q", arguments) is None or arguments.get("k", arguments) is None:
        raise UnsupportedError("q or k is None, for which flashtune has no kernels: pass all of q, k and v")
