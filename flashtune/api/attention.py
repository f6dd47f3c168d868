"""`attention` for dense tensors."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from flashtune.core.arguments import checked, read_count
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
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
from flashtune.runtime.call_cache import check_arguments, serve
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
    """Computes softmax(scale · q·kᵀ, masked) · v with the kernel that is selected for this GPU and shape.

    The call does not tune. `flashtune search` does. For a shape without tuned configs, a default config is
    used with a warning. The first call of a shape compiles, loads and, if necessary, checks a kernel.

    Args:
        q: Queries [batch, heads, seqlen_q, head_dim] ("bshd": [batch, seqlen_q, heads, head_dim]), in
            bfloat16, float16, float32 or float8_e4m3fn. Strides are arbitrary, but the last dimension is
            contiguous.
        k: Keys [batch, kv_heads, seqlen_kv, head_dim]; `kv_heads` divides `heads`.
        v: Values [batch, kv_heads, seqlen_kv, value_head_dim].
        causal: With True or "bottom_right", the last query sees all keys, as in flash_attn. With "top_left",
            the first query sees only the first key, as with SDPA's `is_causal`. The position of a query
            among the keys is its index plus seqlen_kv - seqlen_q. With "top_left" it is its index.
        window: (left, right), as flash_attn's `window_size`. A query sees the key at its position, `left`
            keys before it and `right` keys after it. -1 or None means no limit on that side. A causal mask
            hides all keys after the position. A window of w keys including the own key is (w - 1, 0).
        softcap: Replaces scores s by softcap · tanh(s / softcap). None or 0 disables it.
        alibi_slopes: ALiBi slopes, float32 [heads] or [batch, heads]: slope · |position - key| is subtracted
            from the scores.
        attn_bias: Bias that is added to the scores after softcap and ALiBi, in q's type: [batch, heads,
            seqlen_q, seqlen_kv]. All dimensions but the last may be 1. -inf hides a key.
        attn_mask: Boolean mask of such a shape, True where a query sees a key. It is combined with the other
            masks. Keys and values that it hides must be finite: with prefer="fastest", NaN or infinity
            there may give NaN.
        sinks: Logit of each head that has a share of the softmax but no value (gpt-oss): float32 [heads].
        sink_tokens: Number of first keys that are exempt from window and chunk.
        prefix_lengths: Number of first keys of each sequence that all its queries see: int32 [batch].
        chunk: Number of keys of a chunk. A query sees only keys of its own chunk (Llama 4). 0 for no chunks.
        kv_lengths: Number of valid keys of each sequence, if k and v are longer: int32 [batch].
        scale: Factor of the scores, which may be negative; 1 / sqrt(head_dim) by default.
        layout: Order of the dimensions of the inputs and the output: "bhsd" or "bshd".
        return_lse: Whether to return the log-sum-exp of each row too.
        prefer: "fastest" may use torch's SDPA if the search measured it as faster. "generated" uses only
            generated kernels.
        q_scale: Factor of the elements of a float8_e4m3fn q, for each sequence and head: float32
            [batch, heads], positive; 1 by default. See `flashtune.quantize`.
        k_scale: Factor of the elements of k, [batch, kv_heads]. If only k and v are 8-bit (float8_e4m3fn or
            int8) and q has 16 or 32 bits, k_scale and v_scale are required, as [1], [kv_heads] or
            [batch, kv_heads].
        v_scale: Factor of the elements of v, as k_scale.
        dropout_p: Fraction of attention weights to drop, less than 1. The others are divided by
            1 - dropout_p. Each call draws from the device's torch generator, also without gradients: pass 0
            outside of training. The log-sum-exp ignores dropout.
        deterministic: Whether gradients must be bit-identical between runs.
            torch.use_deterministic_algorithms(True) has the same effect. The output is always bit-identical.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in the call's layout: bfloat16 if the inputs are
        float8_e4m3fn, else in q's type. Rows without visible keys are zeros. With `return_lse`, also the
        natural log-sum-exp [batch, heads, seqlen_q] in float32, including sinks. It is -inf for rows without
        visible keys and sinks.

    Raises:
        ProblemError: The tensors do not match one another, or no backend supports the call.
        KernelError: The shape is new and a CUDA graph is being captured (see `flashtune.plan`). Or `prefer`
            is "generated" and no kernel compiles or loads on this GPU.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
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
            and (scales is NO_EXTRA_INPUTS or getattr(q, "dtype", E4M3) is E4M3)
        )
    except (RuntimeError, ValueError):
        # Arrays instead of numbers have no truth value. `dense_call` raises the error.
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
        return checked(serve, check_arguments, q, k, v, *options)
    require_tensors(q, k, v)
    return checked(call_op, check_arguments, q, k, v, *options)


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
    side = ExtraInputs(
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
