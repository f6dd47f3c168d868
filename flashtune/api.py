"""`attention`: the call that programs make."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from flashtune.calls import serve
from flashtune.ops import call_op
from flashtune.quantization import given_scales
from flashtune.request import require_tensors
from flashtune.serving import Result

CausalOption = bool | Literal["none", "top_left", "bottom_right"]
LayoutOption = Literal["bhsd", "bshd"]
PreferOption = Literal["fastest", "generated"]

# Bound once: each is asked in every call.
_compiling = torch.compiler.is_dynamo_compiling
_function_mode = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: Literal[False] = ...,
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: Literal[True],
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: CausalOption = ...,
    scale: float | None = ...,
    layout: LayoutOption = ...,
    return_lse: bool,
    prefer: PreferOption = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
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
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
            "top_left" lets the first query see the first key, as SDPA's `is_causal` does.
        scale: Factor of the scores, of any sign; 1 / sqrt(head_dim) by default.
        layout: The order of the dimensions, of the output too.
        return_lse: Whether the log-sum-exp of each row is returned too.
        prefer: "fastest" may hand the problem to torch's SDPA where the search measured it as
            faster; "generated" never does.
        q_scale: What the elements of a float8_e4m3fn q are to be multiplied with, for each sequence
            and head: float32 [batch, heads], positive; 1 by default. See `flashtune.quantize`.
        k_scale: Likewise of k, [batch, kv_heads].
        v_scale: Likewise of v, [batch, kv_heads].

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in the call's layout, in bfloat16 where the
        inputs are float8_e4m3fn and in their type otherwise. Rows with nothing
        to attend to are zeros. With `return_lse` also the natural log-sum-exp
        [batch, heads, seqlen_q] in float32, -inf for such rows.

    Raises:
        ProblemError: The tensors do not fit one another, or nobody can serve them.
        KernelError: The shape is new and a CUDA graph is being captured (see `flashtune.plan`), or
            only generated kernels may serve and none compiles or loads on this GPU.
        VerificationError: Only generated kernels may serve and they are wrong on this GPU.
    """
    scales = given_scales(q_scale, k_scale, v_scale)
    if _compiling():
        return call_op(q, k, v, causal, scale, layout, return_lse, prefer, scales)
    if type(q) is type(k) is type(v) is Tensor and not (
        _function_mode() or _dispatch_modes() or _transforms() is not None
    ):
        return serve(q, k, v, causal, scale, layout, return_lse, prefer, scales)
    require_tensors(q, k, v)
    return call_op(q, k, v, causal, scale, layout, return_lse, prefer, scales)
