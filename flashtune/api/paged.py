"""`attention_paged` and its plan: attention with a paged KV cache, for decoding and chunked prefill."""

from typing import Literal, Unpack, overload

from torch import Tensor

from flashtune.api.merge_states import attend_shared, read_shared
from flashtune.api.plan import Plan, planned
from flashtune.request.call import PagedCallOptions, PagedFlexOptions, PagedOptions
from flashtune.request.functions.call import MaskMod, ScoreMod, paged_flex_call
from flashtune.request.request import Result
from flashtune.runtime.torch_ops import attend


@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
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
    kv_lengths: Tensor,
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
    kv_lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Result: ...
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool = False,
    shared_prefix: int = 0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **options: Unpack[PagedCallOptions],
) -> Result:
    """Computes attention of new tokens to sequences in a paged KV cache.

    The cache already contains the keys and values of the new tokens, and `kv_lengths` includes them. The last
    query of a sequence has the position of its last key. Lengths and block tables are read only on the GPU,
    so that they may change between replays of a CUDA graph.

    Args:
        q: Queries [batch, q_len, heads, head_dim] with equal numbers for all sequences, or [batch, heads,
            head_dim] with one for each. With `cu_seqlens_q`, packed queries [total_q, heads, head_dim]
            (chunked prefill).
        k_cache: Pages of keys, [pages, page_size, kv_heads, head_dim] ("hnd": [pages, kv_heads, page_size,
            head_dim]), in q's type, float8_e4m3fn or int8. page_size is a power of two up to 256.
        v_cache: Pages of values, [..., value_head_dim]. None if the values are the first `value_head_dim`
            columns of the keys (DeepSeek's MLA).
        block_table: Pages of each sequence in order, int32 [batch, max_pages]. Entries after a sequence's
            last page are ignored.
        kv_lengths: Number of keys of each sequence, int32 [batch]; may be 0.
        return_lse: Whether to return the log-sum-exp of each row too.
        shared_prefix: Number of first tokens that all sequences share, a multiple of the page size. Their
            rows of `block_table` must start with the same pages. A separate pass reads these once for all
            sequences, and its result is merged with the rest. All queries must come after the prefix.
            Results of sequences shorter than the prefix are not valid. Timings do not affect this option.
            It cannot be combined with window, chunk, ALiBi, prefix lengths or functions.
        score_mod: A function of (score, batch, head, query, key) that returns the changed score, as of
            `flex_attention`. `batch` is the number of the sequence, and `head` a query head. `query` and
            `key` are positions in the sequence: query i of n is at `kv_lengths - n + i`.
        mask_mod: A function of (batch, head, query, key) that returns whether the key is visible. `causal`
            hides later keys in addition.
        **options: `causal` (True by default), `cu_seqlens_q` (int32 [batch + 1]) and `max_seqlen_q` for
            packed queries, `layout` ("nhd" or "hnd") and `value_head_dim`. `tree_mask` is bool [batch, q_len,
            q_len], with cu_seqlens_q [batch, max_seqlen_q, max_seqlen_q]: whether query i sees the key of
            query j. All see older keys. A sequence of n queries uses its first n rows and columns.
            Also `window`, `softcap`, `alibi_slopes`, `sinks`, `sink_tokens`, `prefix_lengths`, `chunk`,
            `scale`, `prefer` and `batch_invariant` as in `attention`. `k_scale` and `v_scale` of an 8-bit
            cache are float32 [1],
            [kv_heads] or [pages, kv_heads].

    Returns:
        The output in q's shape and type, but with value_head_dim as last dimension. With `return_lse`, also
        the natural log-sum-exp in float32, [batch, heads, q_len], [batch, heads] or [heads, total_q].

    Raises:
        ProblemError: The tensors do not match one another, an input requires grad, or no backend supports
            the call.
        KernelError: The kind of call is new and a CUDA graph is being captured (see `flashtune.plan_paged`).
            Or `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    tensors = q, k_cache, v_cache, block_table, kv_lengths
    call = paged_flex_call(*tensors, return_lse=return_lse, score_mod=score_mod, mask_mod=mask_mod, **options)
    shared_prefix = read_shared(shared_prefix)
    return attend_shared(call._replace(shared_prefix=shared_prefix)) if shared_prefix else attend(call)


@overload
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> Plan[Tensor]: ...
@overload
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Plan[Result]: ...
def plan_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool = False,
    shared_prefix: int = 0,
    **options: Unpack[PagedFlexOptions],
) -> Plan[Result]:
    """Prepares a call of `attention_paged` with the same arguments.

    Lengths and block tables may change from call to call, or in place between replays of a CUDA graph. The
    shape of the block table limits them. The length of a shared prefix is fixed, but its pages may change.

    Returns:
        A callable with the parameters (q, k_cache, v_cache, block_table, kv_lengths). Tensors that were
        passed as options are passed by name.

    Raises:
        ProblemError: As `attention_paged`; KernelError and VerificationError too.
    """
    shared = read_shared(shared_prefix)
    tensors = q, k_cache, v_cache, block_table, kv_lengths
    return planned("plan_paged", paged_flex_call, tensors, options, shared, return_lse=return_lse)
