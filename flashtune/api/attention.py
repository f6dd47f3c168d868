"""`attention` for dense tensors."""

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from flashtune.core.features.table import NUMBER_INPUTS
from flashtune.request.call import CausalOption, DenseOptions, LayoutOption, PreferOption, dense_call
from flashtune.request.invariance import is_batch_invariant
from flashtune.request.request import Result
from flashtune.runtime.call_cache import known_executor
from flashtune.runtime.torch_modes import is_compiling
from flashtune.runtime.torch_ops import attend, call_plain_operator

# Numbers that mean the same as None if they are 0.
NUMBERS = ("sink_tokens", "chunk", *(number.option for number in NUMBER_INPUTS.values()))


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
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
    return_lse: bool = False,
    prefer: PreferOption = "fastest",
    deterministic: bool = False,
    **features: Any,
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
        alibi_slopes: ALiBi slopes, float32 [heads] or [batch, heads]: `slope · |position - key|` is
            subtracted from the scores.
        attn_bias: Bias that is added to the scores after softcap and ALiBi, in q's type: [batch, heads,
            seqlen_q, seqlen_kv]. All dimensions but the last may be 1. -inf hides a key.
        attn_mask: Boolean mask of such a shape, True where a query sees a key. It is combined with the other
            masks. Keys and values that it hides must be finite: with prefer="fastest", NaN or infinity
            there may give NaN.
        block_mask: A `flashtune.BlockMask`: the blocks of keys that each block of queries sees. Hidden blocks
            are not read.
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
        batch_invariant: Whether the bits of a row must not depend on the batch, as docs/invariance.md defines
            it. By default False, or the value of `flashtune.set_batch_invariant`. Gradients are not included.
        **features: The arguments above that are not in the signature.

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
    if not ((features and _have_effect(features)) or is_batch_invariant()):
        if is_compiling() and type(return_lse) is bool and type(deterministic) is bool:
            return call_plain_operator(q, k, v, causal, scale, layout, return_lse, prefer, deterministic)
        executor = known_executor(q, k, v, causal, scale, layout, return_lse, prefer, deterministic)
        if executor is not None:
            return executor(q, k, v, scale)
    call = dense_call(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        layout=layout,
        return_lse=return_lse,
        prefer=prefer,
        deterministic=deterministic,
        **features,
    )
    return attend(call)


def _have_effect(features: dict[str, object]) -> bool:
    """Returns whether arguments need more than the look-up of a call without features."""
    for name, value in features.items():
        if value is not None and not (type(value) in (int, float) and value == 0 and name in NUMBERS):
            return True
    return False
