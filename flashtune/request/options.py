"""`Call` and `Options`: the common record of all entry points for attention."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32, MIN_FLOAT32, read_count, shown
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import ExtraInputs
from flashtune.request.dropout import draw_seed

CausalOption = bool | Literal["none", "top_left", "bottom_right"]
LayoutOption = Literal["bhsd", "bshd"]
PageLayoutOption = Literal["nhd", "hnd"]
PreferOption = Literal["fastest", "generated"]
Bound = int | None
Window = tuple[Bound, Bound]

NO_WINDOW: Window = (None, None)
# The largest float32 below one.
MAX_DROPOUT = 1.0 - 2.0**-24


class Options(NamedTuple):
    """The options of a call except tensors and numbers for kernels; a part of the call cache's keys.

    Attributes:
        causal: The causal mask and its alignment.
        layout: The order of the dimensions of q and the output, a value of `Layout`.
        kv_layout: The order of the dimensions of k and v.
        return_lse: Whether to return the log-sum-exp.
        prefer: Whether another implementation may serve the call, a value of `Prefer`.
        window: Numbers of visible keys before and after the query's own; None means all.
        sink_tokens: Keys at the start that stay visible.
        chunk: Keys per chunk; 0 means no chunks.
        max_seqlen_q: Queries of the longest varlen sequence; 0 without varlen.
        max_seqlen_k: Keys of the longest varlen sequence.
        latent: Number of columns of k that are also v (MLA); 0 if v is a tensor.
        deterministic: Whether gradients must be reproducible bit for bit.
    """

    causal: bool | str
    layout: str
    kv_layout: str
    return_lse: bool
    prefer: str
    window: Window = NO_WINDOW
    sink_tokens: int = 0
    chunk: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    latent: int = 0
    deterministic: bool = False


class Call(NamedTuple):
    """One call: its tensors in the layouts of `options`, and all other arguments.

    With MLA, `v` is k itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    options: Options
    side: ExtraInputs


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that all entry points share, as in `attention`, except `return_lse`."""

    causal: CausalOption
    window: Window | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    sink_tokens: int
    prefix_lengths: Tensor | None
    chunk: int
    scale: float | None
    prefer: PreferOption
    k_scale: Tensor | None
    v_scale: Tensor | None


class DenseOptions(CommonOptions, total=False):
    """Keyword arguments of `attention`."""

    layout: LayoutOption
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    kv_lengths: Tensor | None
    q_scale: Tensor | None
    dropout_p: float
    deterministic: bool


class VarlenOptions(CommonOptions, total=False):
    """Keyword arguments of `attention_varlen`."""

    dropout_p: float
    deterministic: bool


class PagedCallOptions(CommonOptions, total=False):
    """Keyword arguments of `attention_paged` for a single pass over the keys."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    layout: PageLayoutOption
    value_head_dim: int | None


class PagedOptions(PagedCallOptions, total=False):
    """Keyword arguments of `attention_paged`."""

    shared_prefix: int


def read_window(window: object) -> Window:
    """Returns both bounds of a window; None means unbounded.

    Raises:
        ProblemError: The window is not a pair of numbers of keys.
    """
    if window is None:
        return NO_WINDOW
    if not isinstance(window, tuple) or len(window) != 2:
        raise ProblemError(
            f"window cannot be {shown(window)}: pass (left, right), the keys that a query sees before its "
            "own and behind it, with -1 or None for all"
        )
    left, right = window
    return _bound("left", left), _bound("right", right)


def _bound(name: str, value: object) -> Bound:
    if value is None or (isinstance(value, int) and value == -1):
        return None
    return read_count(f"the window's {name} bound", value, "a number of keys, or -1 or None for all of them")


def read_longest(max_seqlen_q: object, q: object) -> int:
    """Returns the number of queries of the longest varlen sequence.

    Raises:
        ProblemError: It is not a number, or exceeds the tokens of q.
    """
    longest = read_count("max_seqlen_q", max_seqlen_q, "the queries of the longest sequence")
    packed = isinstance(q, Tensor) and not q.is_nested and q.dim() == 3
    tokens = q.shape[0] if packed else 0  # type: ignore[attr-defined]
    if tokens and longest > tokens:
        raise ProblemError(
            f"max_seqlen_q is {longest} and q has {tokens} tokens: pass q as [tokens, heads, head_dim], and "
            "the queries of the longest sequence"
        )
    return longest


def read_softcap(softcap: float | None) -> float | None:
    """Returns the softcap. 0 means none, as in flash_attn.

    Raises:
        ProblemError: The softcap is negative or not a float32 number.
    """
    if softcap is None:
        return None
    if not isinstance(softcap, (int, float)) or not (softcap == 0 or MIN_FLOAT32 <= softcap <= MAX_FLOAT32):
        raise ProblemError(f"softcap cannot be {shown(softcap)}: pass a positive number, or None for no cap")
    return float(softcap) or None


def read_dropout(dropout: float) -> float | None:
    """Returns the fraction of dropped probabilities, None for no dropout.

    Raises:
        ProblemError: It is not a number in [0, 1).
    """
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout <= MAX_DROPOUT:
        raise ProblemError(
            f"dropout_p cannot be {shown(dropout)}: pass a number from 0 up to, and not as much as, 1"
        )
    return float(dropout) or None


def seeded(call: Call) -> Call:
    """Returns the call with a new seed if it has dropout."""
    if call.side.dropout is None:
        return call
    return call._replace(side=call.side._replace(seed=draw_seed(call.q.device)))


def read_bias(attn_bias: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Returns the additive bias or the boolean mask of a call.

    Raises:
        ProblemError: Both are given, or one has the type of the other.
    """
    if attn_mask is None:
        if isinstance(attn_bias, Tensor) and attn_bias.dtype is torch.bool:
            raise ProblemError("attn_bias is torch.bool: pass it as attn_mask, where True lets a query see")
        return attn_bias
    if attn_bias is not None:
        raise ProblemError(
            "attn_bias and attn_mask are both given: pass one of them, with -inf in the bias for False"
        )
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype is not torch.bool:
        kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise ProblemError(f"attn_mask is {kind}: pass a bool tensor, or numbers to add as attn_bias")
    return attn_mask


def is_plain(call: Call) -> bool:
    """Returns whether a call of `attention` uses only shapes, types and the causal mask.

    `sink_tokens` has no effect without a window or chunks.
    """
    left, right = call.options.window
    if not (left is None and right is None) or call.options.chunk:
        return False
    if any(value is not None for value in call.side[len(call.side.scales) :]):
        return False
    given = any(scale is not None for scale in call.side.scales)
    return not given or (isinstance(call.q, Tensor) and call.q.dtype is torch.float8_e4m3fn)
