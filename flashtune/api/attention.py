"""`attention`: the call that programs make."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from flashtune.core.arguments import checked, read_count
from flashtune.core.extra_inputs import NO_SIDE, Side
from flashtune.request.options import (
    Call,
    CausalOption,
    DenseOptions,
    LayoutOption,
    Options,
    PreferOption,
    Window,
    is_plain,
    read_bias,
    read_dropout,
    read_softcap,
    read_window,
)
from flashtune.request.quantization import E4M3, given_scales
from flashtune.request.request import Result, check_flags, require_tensors
from flashtune.runtime.call_cache import check_serve, serve
from flashtune.runtime.torch_modes import runs_eagerly
from flashtune.runtime.torch_ops import attend, call_op


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[DenseOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[DenseOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[DenseOptions]
) -> Result: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    prefix_lengths: Tensor | None = None,
    chunk: int = 0,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
    return_lse: bool = False,
    prefer: PreferOption = "fastest",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> Result:
    """softmax(scale · q·kᵀ, masked) · v, by the best kernel that is known for this GPU and shape.

    Nothing is tuned here: `flashtune search` did that, or a default config serves and a warning
    says so. The first call of a shape compiles, loads and, where needed, checks a kernel.

    Args:
        q: Queries [batch, heads, seqlen_q, head_dim] ("bshd": [batch, seqlen_q, heads, head_dim]),
            of any strides with a contiguous last dimension, in bfloat16, float16, float32 or
            float8_e4m3fn.
        k: Keys [batch, kv_heads, seqlen_kv, head_dim]; `kv_heads` divides `heads`.
        v: Values [batch, kv_heads, seqlen_kv, value_head_dim].
        causal: True and "bottom_right" let the last query see every key, as flash_attn does;
            "top_left" lets the first query see the first key, as SDPA's `is_causal` does. A query's place
            among the keys is its index, counted so that the last query stands at the last key; with
            "top_left" as it is.
        window: (left, right), as flash_attn's `window_size`: a query sees so many keys before its own place
            and so many behind it, its own beside them; -1 or None for all of a side. With a causal mask
            nothing behind is seen anyway. A window that counts the own key, of w keys, is (w - 1, 0).
        softcap: Scores s become softcap · tanh(s / softcap); None or 0 for none.
        alibi_slopes: slope · |place - key| is taken off the scores: float32 [heads] or [batch, heads].
        attn_bias: Numbers to add to the scores after all of that, in q's type: [batch, heads, seqlen_q,
            seqlen_kv], or 1 in place of any but the last; -inf hides a key.
        attn_mask: Where a query sees a key, bool, of such a shape; beside the other masks. Keys and values
            that it hides must be finite: with prefer="fastest" NaN or infinity there may give NaN.
        sinks: A score for each head that takes weight and has no value (gpt-oss): float32 [heads].
        sink_tokens: First keys that window and chunk hide from nobody.
        prefix_lengths: First keys of each sequence that all its queries see: int32 [batch].
        chunk: Keys of a chunk: a query sees those of its own alone (Llama 4); 0 for no chunks.
        kv_lengths: Keys of each sequence, where k and v have room for more: int32 [batch].
        scale: Factor of the scores, of any sign; 1 / sqrt(head_dim) by default.
        layout: The order of the dimensions, of the output too.
        return_lse: Whether the log-sum-exp of each row is returned too.
        prefer: "fastest" may hand the problem to torch's SDPA where the search measured it as
            faster; "generated" never does.
        q_scale: What the elements of a float8_e4m3fn q are to be multiplied with, for each sequence
            and head: float32 [batch, heads], positive; 1 by default. See `flashtune.quantize`.
        k_scale: Likewise of k, [batch, kv_heads]. With k and v in float8_e4m3fn or int8 beside a q of 16 or
            32 bits: [1], [kv_heads] or [batch, kv_heads], and then neither may be left out.
        v_scale: Likewise of v.
        dropout_p: The share of weights that are dropped, under 1; the rest is divided by 1 - dropout_p. Which
            weights fall is drawn anew by torch's generator of the device in every call, with and
            without gradients: pass 0 where nothing is trained. The log-sum-exp knows nothing of it.
        deterministic: Whether gradients must be the same bits in every run, as they are too under
            torch.use_deterministic_algorithms(True). The output always is.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in the call's layout, in bfloat16 where the
        inputs are float8_e4m3fn and in q's type otherwise. Rows with nothing
        to attend to are zeros. With `return_lse` also the natural log-sum-exp
        [batch, heads, seqlen_q] in float32, -inf for such rows; a sink counts in it.

    Raises:
        ProblemError: The tensors do not fit one another, or nobody can serve them.
        KernelError: The shape is new and a CUDA graph is being captured (see `flashtune.plan`), or
            only generated kernels may serve and none compiles or loads on this GPU.
        VerificationError: Only generated kernels may serve and they are wrong on this GPU.
    """
    check_flags(causal, return_lse, deterministic)
    scales = given_scales(q_scale, k_scale, v_scale)
    try:
        is_simple = (
            window is None
            and softcap is None
            and alibi_slopes is None
            and attn_bias is None
            and attn_mask is None
            and sinks is None
            and prefix_lengths is None
            and kv_lengths is None
            and not sink_tokens
            and not chunk
            and not dropout_p
            and (scales is NO_SIDE or getattr(q, "dtype", E4M3) is E4M3)
        )
    except (RuntimeError, ValueError):
        # An array in place of a number, which has no truth value: the call's record refuses it.
        is_simple = False
    if not is_simple:
        call = dense_call(
            q,
            k,
            v,
            return_lse=return_lse,
            causal=causal,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            attn_bias=attn_bias,
            attn_mask=attn_mask,
            sinks=sinks,
            sink_tokens=sink_tokens,
            prefix_lengths=prefix_lengths,
            chunk=chunk,
            kv_lengths=kv_lengths,
            scale=scale,
            layout=layout,
            prefer=prefer,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            dropout_p=dropout_p,
            deterministic=deterministic,
        )
        if not is_plain(call):
            return attend(call)
    options = causal, scale, layout, return_lse, prefer, scales, deterministic
    if runs_eagerly(q, k, v):
        return checked(serve, check_serve, q, k, v, *options)
    require_tensors(q, k, v)
    return checked(call_op, check_serve, q, k, v, *options)


def dense_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    causal: CausalOption = False,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    prefix_lengths: Tensor | None = None,
    chunk: int = 0,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
    prefer: PreferOption = "fastest",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> Call:
    """The record of a call of `attention`; arguments and errors are its own."""
    check_flags(causal, return_lse, deterministic)
    options = Options(
        causal,
        layout,
        layout,
        return_lse,
        prefer,
        read_window(window),
        read_count("sink_tokens", sink_tokens, "how many first tokens stay visible"),
        read_count("chunk", chunk, "how many keys are a chunk, or 0 for no chunks"),
        deterministic=deterministic,
    )
    side = Side(
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        slopes=alibi_slopes,
        bias=read_bias(attn_bias, attn_mask),
        sinks=sinks,
        prefix=prefix_lengths,
        seqlens_kv=kv_lengths,
        softcap=read_softcap(softcap),
        dropout=read_dropout(dropout_p),
    )
    return Call(q, k, v, scale, options, side)
