"""Attention of dense, packed and paged tensors by flashtune's functions, with flash_attn's widths and types.

- Values wider than kernels take are split into parts of columns. The softmax of all parts is the same.
- Queries in e4m3 that kernels do not take are widened to bfloat16, which is exact, and scaled.
- `flash_attn_combine` combines results over parts of the keys.

Queries, keys and values are [batch, tokens, heads, width], or packed [tokens, heads, width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flashtune.api.attention import attention
from flashtune.api.paged import attention_paged
from flashtune.api.varlen import attention_varlen
from flashtune.core.constant_tensors import constants
from flashtune.core.problem import MAX_HEAD_DIM
from flashtune.integrations.flash_attn.features import Descales, Features, UnsupportedError
from flashtune.integrations.flash_attn.token_rows import sequence_numbers
from flashtune.recording.callers import called_by
from flashtune.request.call import dense_call, varlen_call
from flashtune.request.request import Result
from flashtune.runtime.torch_modes import is_tracing
from flashtune.runtime.torch_ops import attend

# The output, and the log-sum-exp if the call returns it.
Attended = tuple[Tensor, Tensor | None]
E4M3 = torch.float8_e4m3fn


@called_by("flash_attn")
def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Attended:
    """Returns the attention of dense queries, keys and values.

    `lengths` is the number of keys of each sequence, int32 [batch]. `mask` is True where a query sees a key,
    bool [batch, heads | 1, queries, keys].
    """
    options = features.options() | {"layout": "bshd"}
    if lengths is not None:
        options["kv_lengths"] = lengths
    if mask is not None:
        options["attn_mask"] = mask
    q, k, v = (_with_rows(tensor) for tensor in (q, k, v))
    finish = None
    if q.dtype is E4M3:
        if features.is_plain and lengths is None and mask is None and v.shape[-1] <= MAX_HEAD_DIM:
            options |= _native_scales(q, k, features.descales)
        else:
            q, finish = _widened(q, k, features.descales, None)
            options |= _unit_scales(k)

    def serve(values: Tensor, with_lse: bool) -> Result:
        if features.seed is None:
            return attention(q, k, values, return_lse=with_lse, **options)
        call = dense_call(q, k, values, return_lse=with_lse, **options)
        return attend(call._replace(side=call.side._replace(seed=features.seed)))

    return _finished(_in_parts(serve, v, features.wants_lse), finish)


@called_by("flash_attn")
def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    features: Features,
) -> Attended:
    """Returns the attention of packed sequences. `starts` and `longest` are those of queries and of keys."""
    options = features.options()
    q, k, v = (_with_rows(tensor) for tensor in (q, k, v))
    finish = None
    if q.dtype is E4M3:
        q, finish = _widened(q, k, features.descales, starts[0])
        options |= _unit_scales(k)
    starts_q, starts_k = (_int32(offsets) for offsets in starts)
    # flash_attn accepts any upper bound.
    lengths = starts_q, starts_k, min(longest[0], q.shape[0]), longest[1]

    def serve(values: Tensor, with_lse: bool) -> Result:
        if features.seed is None:
            return attention_varlen(q, k, values, *lengths, return_lse=with_lse, **options)
        call = varlen_call(q, k, values, *lengths, return_lse=with_lse, **options)
        return attend(call._replace(side=call.side._replace(seed=features.seed)))

    return _finished(_in_parts(serve, v, features.wants_lse), finish)


@called_by("flash_attn")
def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    features: Features,
    *,
    starts: Tensor | None = None,
    longest: int = 0,
    latent: int = 0,
) -> Attended:
    """Returns the attention to keys in pages, without gradients.

    Args:
        q: Queries, packed with `starts`.
        k: Pages of keys, [pages, page size, kv_heads, width].
        v: Pages of values; None if they are the first `latent` columns of the keys.
        table: Pages of each sequence, int32 [batch, columns].
        lengths: Number of keys of each sequence, int32 [batch].
        features: The options.
        starts: Offsets of packed queries.
        longest: Number of queries of the longest sequence.
        latent: Width of the values, if `v` is None.
    """
    if features.dropout:
        raise UnsupportedError("dropout_p goes with dense or packed keys: leave it out of calls with pages")
    if features.has_negative_bound:
        raise UnsupportedError("a negative bound of a window goes with no keys in pages: leave it out")
    options = features.paged_options()
    if starts is not None:
        options |= {"cu_seqlens_q": _int32(starts), "max_seqlen_q": min(longest, q.shape[0])}
    if v is None:
        options["value_head_dim"] = latent
    q, k = _with_rows(q), _with_rows(k)
    finish = None
    if q.dtype is E4M3:
        q, finish = _widened(q, k, features.descales, starts)
        options |= _unit_scales(k)
    table, lengths = _int32(table), _int32(lengths)

    def serve(values: Tensor | None, with_lse: bool) -> Result:
        return attention_paged(q, k, values, table, lengths, return_lse=with_lse, **options)

    with torch.no_grad():
        if v is None:
            return _finished(_pair(serve(None, features.wants_lse)), finish)
        return _finished(_in_parts(serve, _with_rows(v), features.wants_lse), finish)


class NoGradient(torch.autograd.Function):
    """The output of a call that has no backward pass in flash_attn either."""

    @staticmethod
    def forward(ctx: Any, why: str, out: Tensor, *inputs: Tensor | None) -> Tensor:
        """Returns the output, connected to the inputs."""
        del inputs
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raises an error."""
        del gradients
        raise UnsupportedError(ctx.why)


def without_gradient(why: str, out: Tensor, *inputs: Tensor | None) -> Tensor:
    """Returns the output of a call without a backward pass. `why` is the error of a backward pass."""
    # A traced program with a function of Python cannot be saved.
    if is_tracing() or not torch.is_grad_enabled():
        return out
    if any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return cast("Tensor", NoGradient.apply(why, out, *inputs))  # type: ignore[no-untyped-call]
    return out


def combined(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp over the keys of all parts, in float32.

    Args:
        out_partial: Outputs, [parts, ..., heads, width].
        lse_partial: Their natural log-sum-exps, [parts, ..., heads]. The outputs of infinity do not count.
    """
    parts = lse_partial.float()
    parts = parts.masked_fill(parts == torch.inf, -torch.inf)
    lse = torch.logsumexp(parts, 0)
    # A softmax is relative to the largest: large log-sum-exps have no room for the logarithm of their number.
    shares = torch.softmax(parts, 0).masked_fill(lse == -torch.inf, 0.0)[..., None]
    out = torch.zeros_like(out_partial[0], dtype=torch.float32)
    for part, share in zip(out_partial, shares, strict=True):
        # A part without keys may have any output, also NaN.
        out = out + torch.where(share > 0, part.float() * share, 0.0)
    return out, lse


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of all parts, and its log-sum-exp.

    Args:
        out_partial: Outputs, [parts, batch, tokens, heads, width] or [parts, tokens, heads, width].
        lse_partial: Their natural log-sum-exps, float32 without the last dimension. Strides are arbitrary.
        out: A tensor for the output.
        out_dtype: Type of the output; by default that of `out_partial`.
    """
    total, lse = combined(out_partial, lse_partial)
    if out is not None:
        return out.copy_(total), lse
    return total.to(out_dtype or out_partial.dtype), lse


def _in_parts(serve: Callable[[Tensor, bool], Result], v: Tensor, wants_lse: bool) -> Attended:
    """Returns the result for all columns of the values, at most `MAX_HEAD_DIM` in one call."""
    if v.shape[-1] <= MAX_HEAD_DIM:
        return _pair(serve(v, wants_lse))
    parts = v.split(MAX_HEAD_DIM, -1)
    first, lse = _pair(serve(parts[0], wants_lse))
    rest = [_pair(serve(part, False))[0] for part in parts[1:]]
    return torch.cat([first, *rest], -1), lse


def _pair(result: Result) -> Attended:
    return (result, None) if isinstance(result, Tensor) else result


def _finished(result: Attended, finish: Callable[[Tensor], Tensor] | None) -> Attended:
    out = result[0] if finish is None else finish(result[0])
    # Callers of flash_attn view the output in other shapes.
    return out.contiguous(), result[1]


def _with_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor with a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()


def _native_scales(q: Tensor, k: Tensor, descales: Descales) -> dict[str, Tensor]:
    """Returns the scales of a dense call with 8-bit queries. A scale of q is one for each query head."""
    group = q.shape[2] // k.shape[2]
    scales = {"k_scale": descales.k, "v_scale": descales.v}
    if descales.q is not None:
        scales["q_scale"] = descales.q.repeat_interleave(group, 1)
    return {name: scale.contiguous() for name, scale in scales.items() if scale is not None}


def _unit_scales(k: Tensor) -> dict[str, Tensor]:
    """Returns scales of 1 for 8-bit keys and values, whose descales are applied elsewhere."""
    (ones,) = constants((1.0,), 1, torch.float32, k.device)
    return {"k_scale": ones, "v_scale": ones}


def _widened(
    q: Tensor, k: Tensor, descales: Descales, starts: Tensor | None
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Returns queries in bfloat16 times the factors of q and k, and a function that applies that of v.

    The function is None without such a factor.
    """
    group = q.shape[-2] // k.shape[-2]

    def for_rows(scale: Tensor) -> Tensor:
        wide = scale.repeat_interleave(group, 1)[..., None]
        return wide[:, None] if starts is None else wide[sequence_numbers(starts, q.shape[0])]

    wide = q.to(torch.bfloat16)
    factors = [descale for descale in (descales.q, descales.k) if descale is not None]
    if factors:
        factor = factors[0] if len(factors) == 1 else factors[0] * factors[1]
        wide = (q.float() * for_rows(factor)).to(torch.bfloat16)
    values = descales.v
    if values is None:
        return wide, None
    return wide, lambda out: (out.float() * for_rows(values)).to(out.dtype)
