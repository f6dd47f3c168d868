"""`attention_paged` and its plan: keys and values in pages, for decoding and chunked prefill."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from flashtune.api.feature_plans import PagedPlan
from flashtune.api.shared_prefix import attend_shared, read_shared
from flashtune.core.arguments import read_count, shown
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import Side
from flashtune.request.options import (
    Call,
    CausalOption,
    Options,
    PagedCallOptions,
    PagedOptions,
    PageLayoutOption,
    PreferOption,
    Window,
    read_longest,
    read_softcap,
    read_window,
)
from flashtune.request.request import Result, check_flags
from flashtune.runtime.torch_ops import attend

PAGE_LAYOUTS = {"nhd": "bshd", "hnd": "bhsd"}


@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Result: ...
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    shared_prefix: int = 0,
    **options: Unpack[PagedCallOptions],
) -> Result:
    """Attention of new tokens to sequences whose keys and values lie in the pages of a cache.

    The cache holds the new tokens' keys and values already, and `seqlens_k` counts them: the last query of a
    sequence stands at its last key. Lengths and block tables are read on the GPU alone, so that they may
    change between replays of a CUDA graph.

    Args:
        q: [batch, q_len, heads, head_dim], as many queries of each sequence; [batch, heads, head_dim], one of
            each; or with `cu_seqlens_q` packed ones, [total_q, heads, head_dim] (chunked prefill).
        k_cache: Pages of keys, [pages, page_size, kv_heads, head_dim] ("hnd": [pages, kv_heads, page_size,
            head_dim]), of 16, 32, 64, 128 or 256 keys, in q's type, float8_e4m3fn or int8.
        v_cache: Pages of values likewise, [..., value_head_dim]; None where values are the first
            `value_head_dim` columns of the keys (DeepSeek's MLA).
        block_table: The pages of each sequence in order, int32 [batch, pages of the longest]. What stands
            behind a sequence's last page is not looked at.
        seqlens_k: Keys of each sequence, int32 [batch]; 0 is fine.
        return_lse: Whether the log-sum-exp of each row is returned too.
        shared_prefix: A number of first tokens, a multiple of the page size, that all sequences have in
            common, by equal pages at the start of their rows of `block_table`: read once for all of them, in
            a pass of its own whose result is merged with the rest. All queries must stand behind it, and
            sequences that do not reach it have no result. It is done where it is asked for, not where it was
            measured to pay. No window, chunk, ALiBi or prefix lengths go with it.
        **options: `causal` (True by default), `cu_seqlens_q` (int32 [batch + 1]) and `max_seqlen_q` for
            packed queries, `layout` ("nhd" or "hnd"), `value_head_dim`, and `window`, `softcap`,
            `alibi_slopes`, `sinks`, `sink_tokens`, `prefix_lengths`, `chunk`, `scale` and `prefer` as
            `attention` has them; `k_scale` and `v_scale`, float32 [1], [kv_heads] or [pages, kv_heads], for
            caches of 8 bits.

    Returns:
        The output in q's form and type, of width value_head_dim. With `return_lse` also the natural
        log-sum-exp in float32, [batch, heads, q_len], [batch, heads] or [heads, total_q].

    Raises:
        ProblemError: The tensors do not fit one another, an input requires grad, or nobody can serve them.
        KernelError: The kind of call is new and a CUDA graph is being captured (see
            `flashtune.plan_paged`), or only generated kernels may serve and none compiles or loads.
        VerificationError: Only generated kernels may serve and they are wrong on this GPU.
    """
    call = paged_call(q, k_cache, v_cache, block_table, seqlens_k, return_lse=return_lse, **options)
    shared_prefix = read_shared(shared_prefix)
    return attend_shared(call, shared_prefix) if shared_prefix else attend(call)


def paged_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: CausalOption = True,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    prefix_lengths: Tensor | None = None,
    chunk: int = 0,
    scale: float | None = None,
    layout: PageLayoutOption = "nhd",
    prefer: PreferOption = "fastest",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    value_head_dim: int | None = None,
) -> Call:
    """The record of a call of `attention_paged`; arguments and errors are its own."""
    check_flags(causal, return_lse)
    if not isinstance(layout, str) or layout not in PAGE_LAYOUTS:
        raise ProblemError(f"layout cannot be {shown(layout)}: pass 'nhd' or 'hnd'")
    if block_table is None or seqlens_k is None:
        raise ProblemError("block_table or seqlens_k is None: pass the pages and lengths of sequences")
    if (v_cache is None) != (value_head_dim is not None):
        raise ProblemError(
            "values are either a tensor or the first value_head_dim columns of the keys: pass one of v_cache "
            "and value_head_dim"
        )
    latent = 0
    if value_head_dim is not None:
        latent = read_count("value_head_dim", value_head_dim, "how many columns of the keys are values", 1)
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise ProblemError("cu_seqlens_q and max_seqlen_q belong together: pass both for packed queries")
    options = Options(
        causal,
        "thd" if cu_seqlens_q is not None else "bhd" if getattr(q, "ndim", 4) == 3 else "bshd",
        PAGE_LAYOUTS[layout],
        return_lse,
        prefer,
        read_window(window),
        read_count("sink_tokens", sink_tokens, "how many first tokens stay visible"),
        read_count("chunk", chunk, "how many keys are a chunk, or 0 for no chunks"),
        0 if max_seqlen_q is None else read_longest(max_seqlen_q, q),
        latent=latent,
    )
    side = Side(
        k_scale=k_scale,
        v_scale=v_scale,
        slopes=alibi_slopes,
        sinks=sinks,
        prefix=prefix_lengths,
        cu_seqlens_q=cu_seqlens_q,
        seqlens_kv=seqlens_k,
        block_table=block_table,
        softcap=read_softcap(softcap),
    )
    return Call(q, k_cache, k_cache if v_cache is None else v_cache, scale, options, side)


@overload
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> PagedPlan[Tensor]: ...
@overload
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> PagedPlan[Result]: ...
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    shared_prefix: int = 0,
    **options: Unpack[PagedCallOptions],
) -> PagedPlan[Result]:
    """Resolves a call of `attention_paged` once, whose arguments these are.

    Lengths and block tables may change from call to call, or in place between replays of a CUDA graph; the
    block table's shape is what bounds them. A shared prefix keeps its length and may change its pages.

    Returns:
        A callable of (q, k_cache, v_cache, block_table, seqlens_k), and of the same tensors among the options
        by name.

    Raises:
        ProblemError: As `attention_paged`; KernelError and VerificationError too.
    """
    call = paged_call(q, k_cache, v_cache, block_table, seqlens_k, return_lse=return_lse, **options)
    return PagedPlan(call, read_shared(shared_prefix))
