"""The functions below the public ones of flash_attn 2.8, which ring attention and other libraries call.

They take no part in autograd. `rng_state` is int64 [2]: the seed of dropout, and 0.
"""

from __future__ import annotations

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
from flashtune.integrations.flash_attn.features import Features, UnsupportedError, read_features, within
from flashtune.integrations.flash_attn.flash_attn_2 import flash_attn_with_kvcache, with_infinity
from flashtune.integrations.flash_attn.gradients import gradients, row_sums, written
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
        softmax_scale, causal, window, softcap, alibi_slopes=alibi_slopes, dropout=dropout_p
    )
    return _forward(q, k, v, WHOLE, WHOLE, within(features, k.shape[1]), return_softmax)


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
        softmax_scale, causal, window, softcap, alibi_slopes=alibi_slopes, dropout=dropout_p
    )
    features = within(features, max_seqlen_k)
    queries = Sequences(cu_seqlens_q, max_seqlen_q)
    if block_table is None:
        keys = Sequences(cu_seqlens_k, max_seqlen_k, seqused_k, leftpad_k)
        return _forward(q, k, v, queries, keys, features, return_softmax)
    if num_splits > 1:
        raise SplitError("num_splits > 1 is not supported for keys in pages: pass 0")
    cache = caches.cache_of(k, v, block_table, None, block_table.shape[0])
    lengths = as_lengths(cu_seqlens_k) if seqused_k is None else seqused_k
    out, lse = attend_cache(q, cache, lengths, queries, features, skipped=leftpad_k, wants_lse=True)
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
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
    )
    features = within(features, k.shape[1])
    seed = _seed(features, rng_state)
    sequences = WHOLE
    with torch.no_grad():
        found = gradients(dout, q, k, v, out, softmax_lse, sequences, sequences, features, seed)
        written(found, (dq, dk, dv))
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
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
    )
    features = within(features, max_seqlen_k)
    queries, keys = Sequences(cu_seqlens_q, max_seqlen_q), Sequences(cu_seqlens_k, max_seqlen_k)
    seed = _seed(features, rng_state)
    with torch.no_grad():
        found = gradients(dout, q, k, v, out, softmax_lse, queries, keys, features, seed)
        written(found, (dq, dk, dv))
        return row_sums(dout, out)


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Returns the number of keys that flash_attn's kernel visits at a time."""
    return block_of_keys(head_dim, is_dropout, is_causal, capability_of(device))


class SplitError(UnsupportedError, RuntimeError):
    """A number of splits that flash_attn rejects."""


class GeneratorError(KernelError, RuntimeError):
    """A generator of random numbers was passed, which flash_attn rejects."""


class Extension:
    """The functions of flash_attn's extension module `flash_attn_2_cuda`, with positional arguments."""

    @staticmethod
    def fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        alibi_slopes: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        return_softmax: bool,
        generator: object = None,
    ) -> Forward:
        """Returns `_flash_attn_forward`."""
        _refuse_generator(generator)
        options = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax
        return _into(out, _flash_attn_forward(q, k, v, *options))

    @staticmethod
    def varlen_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor | None,
        leftpad_k: Tensor | None,
        block_table: Tensor | None,
        alibi_slopes: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        zero_tensors: bool,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        return_softmax: bool,
        generator: object = None,
        num_splits: int = 0,
    ) -> Forward:
        """Returns `_flash_attn_varlen_forward`."""
        _refuse_generator(generator)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax
        pages = block_table, leftpad_k, seqused_k, zero_tensors, num_splits
        return _into(out, _flash_attn_varlen_forward(q, k, v, *(*lengths, *options, *pages)))

    @staticmethod
    def bwd(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        alibi_slopes: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        deterministic: bool,
        generator: object = None,
        rng_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients, and the result of `_flash_attn_backward`."""
        _refuse_generator(generator)
        results = _allocated((dq, dk, dv), (q, k, v))
        options = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic
        return *results, _flash_attn_backward(
            dout, q, k, v, out, softmax_lse, *(*results, *options, rng_state)
        )

    @staticmethod
    def varlen_bwd(
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
        alibi_slopes: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        zero_tensors: bool,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        deterministic: bool,
        generator: object = None,
        rng_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients, and the result of `_flash_attn_varlen_backward`."""
        _refuse_generator(generator)
        results = _allocated((dq, dk, dv), (q, k, v))
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        options = dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic
        return *results, _flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, *(*results, *lengths, *options, rng_state, zero_tensors)
        )

    @staticmethod
    def fwd_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache_seqlens: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
        block_table: Tensor | None,
        alibi_slopes: Tensor | None,
        out: Tensor | None,
        softmax_scale: float,
        causal: bool,
        left: int,
        right: int,
        softcap: float,
        rotary_interleaved: bool,
        num_splits: int,
    ) -> tuple[Tensor, Tensor]:
        """Returns `flash_attn_with_kvcache` with the log-sum-exp."""
        tokens = k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
        options = softmax_scale, causal, (left, right), softcap, rotary_interleaved, alibi_slopes, num_splits
        found = flash_attn_with_kvcache(q, k_cache, v_cache, *tokens, *options, True)
        assert isinstance(found, tuple)
        return (found[0] if out is None else out.copy_(found[0])), found[1]


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
        seed = draw_seed(q.device) if features.dropout else None
        out, lse = attend_sequences(q, k, v, queries, keys, features, seed=seed, wants_lse=True)
        assert lse is not None
        pattern = q.new_empty(0)
        if seed is not None and return_softmax:
            pattern = dropout_pattern(q, k, queries, keys, features, seed)
        return out, with_infinity(lse), pattern, _state(q, seed)


def _state(q: Tensor, seed: Tensor | None) -> Tensor:
    """Returns the state of the random numbers of a call."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return state if seed is None else torch.cat([seed, state[1:]])


def _seed(features: Features, state: Tensor | None) -> Tensor | None:
    """Returns the seed of a call's dropout."""
    if not features.dropout:
        return None
    if state is None:
        raise UnsupportedError("rng_state is None and dropout_p is not 0: pass that of the forward pass")
    return state[:1].contiguous()


def _allocated(
    given: tuple[Tensor | None, ...], like: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    found = [
        torch.empty_like(one) if other is None else other for one, other in zip(like, given, strict=True)
    ]
    return found[0], found[1], found[2]


def _into(out: Tensor | None, results: Forward) -> Forward:
    return results if out is None else (out.copy_(results[0]), *results[1:])


def _refuse_generator(generator: object) -> None:
    if generator is not None:
        raise GeneratorError(
            "the `generator` argument is no longer supported: pass None, and seed torch's default generator"
        )
