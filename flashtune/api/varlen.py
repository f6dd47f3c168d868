"""`attention_varlen` and its plan: sequences of different lengths, packed without padding."""

from typing import Literal, Unpack, overload

from torch import Tensor

from flashtune.api.plan import Plan, planned
from flashtune.request.call import VarlenOptions, varlen_call
from flashtune.request.request import Result
from flashtune.runtime.torch_ops import attend


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Result: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Result:
    """Computes attention of packed sequences of different lengths. Queries see only keys of their sequence.

    The rows of sequence b are cu_seqlens[b] to cu_seqlens[b + 1], and may be empty. Lengths are read only on
    the GPU, so that they may change between replays of a CUDA graph. Rows after the last sequence are zero,
    with a log-sum-exp of -inf.

    Args:
        q: Queries of all sequences, [total_q, heads, head_dim], in bfloat16, float16 or float32. Strides are
            arbitrary, but the last dimension is contiguous.
        k: Keys, [total_k, kv_heads, head_dim].
        v: Values, [total_k, kv_heads, value_head_dim].
        cu_seqlens_q: Offsets of the sequences' queries and the end of the last one: int32 [batch + 1].
        cu_seqlens_k: Offsets of the sequences' keys, likewise.
        max_seqlen_q: Number of queries of the longest sequence, or more, up to total_q. It is rounded up to
            select kernels.
        max_seqlen_k: Number of keys of the longest sequence, or more. Windows and chunks that are not smaller
            than its rounded value have no effect.
        return_lse: Whether to return the log-sum-exp of each row too.
        **options: `causal`, `window`, `softcap`, `alibi_slopes`, `sinks`, `sink_tokens`, `prefix_lengths`,
            `chunk`, `scale`, `prefer`, `k_scale`, `v_scale`, `dropout_p`, `deterministic` and
            `batch_invariant`, as in `attention`.

    Returns:
        The output [total_q, heads, value_head_dim] in q's type. With `return_lse`, also the natural
        log-sum-exp [heads, total_q] in float32.

    Raises:
        ProblemError: The tensors do not match one another, or no backend supports the call.
        KernelError: The kind of call is new and a CUDA graph is being captured (see `flashtune.plan_varlen`).
            Or `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return attend(varlen_call(q, k, v, *lengths, return_lse=return_lse, **options))


@overload
def plan_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Plan[Tensor]: ...
@overload
def plan_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Plan[Result]: ...
def plan_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Plan[Result]:
    """Prepares a call of `attention_varlen` with the same arguments.

    Lengths may change from call to call, or in place between replays of a CUDA graph. No sequence may become
    longer than max_seqlen_q and max_seqlen_k.

    Returns:
        A callable with the parameters (q, k, v, cu_seqlens_q, cu_seqlens_k). Tensors that were passed as
        options are passed by name.

    Raises:
        ProblemError: As `attention_varlen`; KernelError and VerificationError too.
    """
    numbers = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "return_lse": return_lse}
    return planned("plan_varlen", varlen_call, (q, k, v, cu_seqlens_q, cu_seqlens_k), options, **numbers)
