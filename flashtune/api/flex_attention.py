"""`flex_attention`: attention with a score function and a mask function of the program."""

from typing import Any, Literal, overload

import msgspec
import torch
from torch import Tensor

from flashtune.api.explain import Explanation, explain_call
from flashtune.core.canonical import features_text
from flashtune.core.layouts import in_memory_order
from flashtune.request.functions.block_lists import is_flex_mask, unwritten_lists
from flashtune.request.functions.call import ScoreMod, flex_call
from flashtune.request.functions.warm_calls import warm_flex_call
from flashtune.request.request import Result
from flashtune.runtime.torch_modes import is_compiling
from flashtune.runtime.torch_ops import attend
from flashtune.runtime.visible_lists import visible_lists


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: Any = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: Any = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes attention with the interface of torch's `flex_attention`, by a kernel of this package.

    `score_mod` and the mask function of `block_mask` are traced into expressions, from which a kernel is
    written. Captured numbers, and elements and shapes of captured tensors, may change without a compilation.
    docs/flex-attention.md lists the operations.

    Args:
        query: Queries [batch, heads, seqlen_q, head_dim] in bfloat16, float16 or float32.
        key: Keys [batch, kv_heads, seqlen_kv, head_dim].
        value: Values [batch, kv_heads, seqlen_kv, value_head_dim].
        score_mod: A function of (score, batch, head, query, key) that returns the changed score. The score is
            the product of a query and a key, times the scale, in float32.
        block_mask: A `BlockMask` of torch or of flashtune. The mask function of torch's is evaluated in its
            partial blocks. None shows all keys.
        scale: Factor of the products; 1 / sqrt(head_dim) by default.
        enable_gqa: Whether there may be fewer KV heads than query heads.
        return_lse: Whether to return the log-sum-exp of each row too.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in the type of `query`. Its dimensions
        have the memory order of those of `query`, as in torch. Rows without visible keys are zeros. With
        `return_lse`, also the natural log-sum-exp [batch, heads, seqlen_q] in float32, which is -inf in such
        rows.

    Raises:
        ProblemError: A function has an operation that kernels do not compute, or the tensors do not match.
        KernelError: As `attention`.
    """
    arguments = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, visible_lists
    if is_compiling():
        # The graph breaks here. A decorator would import torch's compiler in all programs.
        result: Result = torch.compiler.disable(_attend)(*arguments)
        return result
    return _attend(*arguments)


def explain_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Explanation:
    """Returns the backend that `flex_attention` would use for these arguments.

    Raises:
        ProblemError: As `flex_attention`.
        StoreError: The user's database cannot be read.
    """
    arguments = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse
    # Nothing is launched. The values of lists do not affect the choice of a kernel.
    call = flex_call(*arguments, unwritten_lists)
    explained = explain_call(call)
    has_functions = score_mod is not None or is_flex_mask(block_mask)
    if not has_functions or call.options.functions or call.options.block_size:
        return explained
    # An identity has no feature.
    return msgspec.structs.replace(explained, recognised=features_text(explained.problem))


def _attend(*arguments: Any) -> Result:
    call = warm_flex_call(*arguments)
    result, order = attend(call), call.options.out_order
    if not order:
        return result
    # SDPA, the unfused computation and operators return tensors of other strides.
    if isinstance(result, Tensor):
        return in_memory_order(result, order)
    return in_memory_order(result[0], order), result[1]
