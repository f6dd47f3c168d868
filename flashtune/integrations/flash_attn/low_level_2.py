"""The functions below the public ones of flash_attn 2.8, which ring attention and other libraries call.

They take no part in autograd. `rng_state` is int64 [2]: the seed of dropout, and 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.dropout_pattern import (
    PADDING,
    block_of_keys,
    capability_of,
    dropout_pattern,
)
from flashtune.integrations.flash_attn.features import Features, UnsupportedError, read_features
from flashtune.integrations.flash_attn.flash_attn_2 import flash_attn_with_kvcache, with_infinity
from flashtune.integrations.flash_attn.gradients import gradients, row_sums
from flashtune.integrations.flash_attn.sequences import attend_cache, attend_sequences
from flashtune.integrations.flash_attn.token_rows import WHOLE, Sequences, as_lengths
from flashtune.request.dropout import draw_seed

# The output, the log-sum-exp, the dropout pattern and the state of the random numbers.
Forward = tuple[Tensor, Tensor, Tensor, Tensor]
USE_TRITON_ROCM = False


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """Returns the forward pass of `flash_attn_func`."""
    window = window_size_left, window_size_right
    features = read_features(
        softmax_scale, causal, window, softcap, k.shape[1], alibi_slopes=alibi_slopes, dropout=dropout_p
    )
    return _forward(q, k, v, WHOLE, WHOLE, features, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """Returns the forward pass of `flash_attn_varlen_func`."""
    del zero_tensors
    window = window_size_left, window_size_right
    features = read_features(
        softmax_scale,
        causal,
        window,
        softcap,
        keys=max_seqlen_k,
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        wants_lse=True,
    )
    queries = Sequences(cu_seqlens_q, max_seqlen_q)
    if block_table is None:
        keys = Sequences(cu_seqlens_k, max_seqlen_k, seqused_k, leftpad_k)
        return _forward(q, k, v, queries, keys, features, return_softmax)
    if num_splits > 1:
        raise SplitError("num_splits > 1 is not supported for keys in pages: pass 0")
    cache = caches.cache_of(k, v, block_table, None, block_table.shape[0])
    lengths = as_lengths(cu_seqlens_k) if seqused_k is None else seqused_k
    out, lse = attend_cache(q, cache, lengths, queries, features, skipped=leftpad_k)
    assert lse is not None
    return out, with_infinity(lse), q.new_empty(0), _state(q, None)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients to dq, dk and dv, and returns the sums of dout · out of all rows."""
    window = window_size_left, window_size_right
    features = read_features(
        softmax_scale,
        causal,
        window,
        softcap,
        keys=k.shape[1],
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
        seed=_seed(dropout_p, rng_state),
    )
    gradients(dout, q, k, v, out, softmax_lse, WHOLE, WHOLE, features, (dq, dk, dv))
    sums = row_sums(dout, out)
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % PADDING))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes the gradients to dq, dk and dv, and returns the sums of dout · out of all rows."""
    del zero_tensors
    window = window_size_left, window_size_right
    features = read_features(
        softmax_scale,
        causal,
        window,
        softcap,
        keys=max_seqlen_k,
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
        seed=_seed(dropout_p, rng_state),
    )
    queries, keys = Sequences(cu_seqlens_q, max_seqlen_q), Sequences(cu_seqlens_k, max_seqlen_k)
    gradients(dout, q, k, v, out, softmax_lse, queries, keys, features, (dq, dk, dv))
    return row_sums(dout, out)


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Returns the number of keys that flash_attn's kernel visits at a time."""
    return block_of_keys(head_dim, is_dropout, is_causal, capability_of(device))


class SplitError(UnsupportedError, RuntimeError):
    """A number of splits that flash_attn rejects."""


class GeneratorError(KernelError, RuntimeError):
    """A generator of random numbers was passed, which flash_attn rejects."""


# The arguments of the extension's functions, in order.
FWD = (
    *("q", "k", "v", "out", "alibi_slopes", "dropout_p", "softmax_scale", "causal"),
    *("window_size_left", "window_size_right", "softcap", "return_softmax", "generator"),
)
VARLEN_FWD = (
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"),
    *("alibi_slopes", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "zero_tensors", "causal"),
    *("window_size_left", "window_size_right", "softcap", "return_softmax", "generator", "num_splits"),
)
BWD = (
    *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "alibi_slopes"),
    *("dropout_p", "softmax_scale", "causal"),
    *("window_size_left", "window_size_right", "softcap", "deterministic", "generator", "rng_state"),
)
VARLEN_BWD = (
    *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k"),
    *("alibi_slopes", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "zero_tensors", "causal"),
    *("window_size_left", "window_size_right", "softcap", "deterministic", "generator", "rng_state"),
)
FWD_KVCACHE = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "rotary_sin", "cache_batch_idx"),
    *("cache_leftpad", "block_table", "alibi_slopes", "out", "softmax_scale", "causal"),
    *("window_size_left", "window_size_right", "softcap", "rotary_interleaved", "num_splits"),
)


class Extension:
    """The functions of flash_attn's extension module `flash_attn_2_cuda`, with positional arguments."""

    @staticmethod
    def fwd(*arguments: Any) -> Forward:
        """Returns `_flash_attn_forward`."""
        options = _named(FWD, arguments, optional=1)
        return _into(options.pop("out"), _flash_attn_forward(**options))

    @staticmethod
    def varlen_fwd(*arguments: Any) -> Forward:
        """Returns `_flash_attn_varlen_forward`."""
        options = _named(VARLEN_FWD, arguments, optional=2)
        return _into(options.pop("out"), _flash_attn_varlen_forward(**options))

    @staticmethod
    def bwd(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients, and the result of `_flash_attn_backward`."""
        return _allocated(_flash_attn_backward, **_named(BWD, arguments, optional=2))

    @staticmethod
    def varlen_bwd(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients, and the result of `_flash_attn_varlen_backward`."""
        return _allocated(_flash_attn_varlen_backward, **_named(VARLEN_BWD, arguments, optional=2))

    @staticmethod
    def fwd_kvcache(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Returns `flash_attn_with_kvcache` with the log-sum-exp."""
        options = _named(FWD_KVCACHE, arguments)
        into = options.pop("out")
        window = options.pop("window_size_left"), options.pop("window_size_right")
        out, lse = flash_attn_with_kvcache(**options, window_size=window, return_softmax_lse=True)
        return (out if into is None else into.copy_(out)), lse


def _named(names: tuple[str, ...], arguments: tuple[Any, ...], optional: int = 0) -> dict[str, Any]:
    """Returns positional arguments by name. The last `optional` ones may be absent."""
    if not len(names) - optional <= len(arguments) <= len(names):
        raise TypeError(f"{len(arguments)} arguments were passed: pass {', '.join(names)}")
    named = dict(zip(names, arguments, strict=False))
    if named.pop("generator", None) is not None:
        raise GeneratorError(
            "the `generator` argument is no longer supported: pass None, and seed torch's default generator"
        )
    return named


def _into(out: Tensor | None, results: Forward) -> Forward:
    return results if out is None else (out.copy_(results[0]), *results[1:])


def _allocated(backward: Callable[..., Tensor], **arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of a backward function, in new tensors where they are None, and its result."""
    for name, gradient in (("q", "dq"), ("k", "dk"), ("v", "dv")):
        if arguments[gradient] is None:
            arguments[gradient] = torch.empty_like(arguments[name])
    sums = backward(**arguments)
    return arguments["dq"], arguments["dk"], arguments["dv"], sums


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequences,
    keys: Sequences,
    features: Features,
    return_softmax: bool,
) -> Forward:
    with torch.no_grad():
        features = features._replace(wants_lse=True, seed=draw_seed(q.device) if features.dropout else None)
        out, lse = attend_sequences(q, k, v, queries, keys, features)
        assert lse is not None
        pattern = q.new_empty(0)
        if features.seed is not None and return_softmax:
            pattern = dropout_pattern(q, k, queries, keys, features)
        return out, with_infinity(lse), pattern, _state(q, features.seed)


def _state(q: Tensor, seed: Tensor | None) -> Tensor:
    """Returns the state of the random numbers of a call."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return state if seed is None else torch.cat([seed, state[1:]])


def _seed(dropout_p: float, state: Tensor | None) -> Tensor | None:
    """Returns the seed of a call's dropout."""
    if not dropout_p:
        return None
    if state is None:
        raise UnsupportedError("rng_state is None and dropout_p is not 0: pass that of the forward pass")
    return state[:1].contiguous()
