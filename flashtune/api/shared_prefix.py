"""Paged attention that reads the common prefix of all sequences once.

All queries attend to the prefix as one sequence, and each to its own suffix. Both results are merged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtune.api.merge_states import merge_attention
from flashtune.core.arguments import read_count
from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import ExtraInputs
from flashtune.core.layouts import Layout
from flashtune.request.options import NO_WINDOW, Call
from flashtune.request.request import Result, require_tensors
from flashtune.request.side_inputs import check_kinds
from flashtune.runtime.torch_ops import attend


def attend_shared(
    call: Call, tokens: int, attends: Sequence[Callable[[Call], Result]] = (attend, attend)
) -> Result:
    """Returns the attention of a paged call whose sequences have a shared prefix.

    Args:
        call: The call.
        tokens: Length of the prefix: whole pages, all before the first query.
        attends: Functions that compute the calls of `shared_calls`.

    Raises:
        ProblemError: The call cannot be split, or as `attention_paged`.
    """
    results = [serve(part) for serve, part in zip(attends, shared_calls(call, tokens), strict=False)]
    if len(results) == 1:
        return results[0]
    (seen, weight), (out, lse) = results
    layout = Layout(call.options.layout)
    out, lse = merge_attention(
        *_as_suffix(seen, weight, layout, call.q.shape[0]), out, lse, layout=call.options.layout
    )
    return (out, lse) if call.options.return_lse else out


def shared_calls(call: Call, tokens: int) -> tuple[Call, ...]:
    """Returns the calls for the prefix and for the suffix, or the call itself if there are no sequences.

    Raises:
        ProblemError: The call cannot be split.
    """
    require_tensors(call.q, call.k, call.v)
    check_kinds(call.side, call.q.device)
    pages = _shared_pages(call, tokens)
    if call.side.block_table is not None and not call.side.block_table.shape[0]:
        return (call,)
    return prefix_call(call, tokens, pages), suffix_call(call, tokens, pages)


def prefix_call(call: Call, tokens: int, pages: int) -> Call:
    """Returns a call of all queries, as one sequence, with the prefix as keys. Each query sees all keys."""
    q = call.q
    q = q.flatten(0, 1) if call.options.layout == Layout.BSHD else q
    assert call.side.block_table is not None
    side = ExtraInputs(
        k_scale=call.side.k_scale,
        v_scale=call.side.v_scale,
        seqlens_kv=_length(tokens, q.device),
        block_table=call.side.block_table[:1, :pages],
        softcap=call.side.softcap,
    )
    options = call.options._replace(
        causal="none", layout="bshd", return_lse=True, max_seqlen_q=0, sink_tokens=0
    )
    return call._replace(q=q.unsqueeze(0), options=options, side=side)


def suffix_call(call: Call, tokens: int, pages: int) -> Call:
    """Returns a call with the pages of each sequence after the prefix, and with the sinks."""
    side = call.side
    assert side.block_table is not None
    assert side.seqlens_kv is not None
    side = side._replace(
        seqlens_kv=(side.seqlens_kv - tokens).clamp_(min=0), block_table=side.block_table[:, pages:]
    )
    return call._replace(options=call.options._replace(return_lse=True, sink_tokens=0), side=side)


def _as_suffix(out: Tensor, lse: Tensor, layout: Layout, batch: int) -> tuple[Tensor, Tensor]:
    """Returns the prefix's output [1, rows, heads, d] and lse [1, heads, rows] in the shapes of the call."""
    out, lse = out[0], lse[0]
    if layout is Layout.BHD:
        return out, lse.transpose(0, 1)
    if layout is Layout.THD:
        return out, lse
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def read_shared(tokens: object) -> int:
    """Returns the number of first tokens that all sequences share.

    Raises:
        ProblemError: It is not a number of tokens.
    """
    return read_count("shared_prefix", tokens, "how many first tokens all sequences share")


def _shared_pages(call: Call, tokens: int) -> int:
    side, options = call.side, call.options
    size = call.k.shape[1 if options.kv_layout == Layout.BSHD else 2] if call.k.dim() == 4 else 0
    if not size or tokens % size:
        raise ProblemError(
            f"shared_prefix is {tokens} and pages hold {size} keys: share whole pages, a multiple of them"
        )
    names = {
        "window": options.window != NO_WINDOW,
        "chunk": options.chunk > 0,
        "alibi_slopes": side.slopes is not None,
        "prefix_lengths": side.prefix is not None,
        "causal='top_left'": options.causal == "top_left",
    }
    given = [name for name, there in names.items() if there]
    if given:
        raise ProblemError(f"shared_prefix does not go with {given[0]}: leave out one of them")
    if side.block_table is None or side.block_table.dim() != 2 or side.block_table.shape[1] < tokens // size:
        raise ProblemError(
            f"shared_prefix is {tokens} and block_table has no {tokens // size} columns: share fewer tokens"
        )
    return tokens // size


@functools.cache
def _length(tokens: int, device: torch.device) -> Tensor:
    """Returns the length of a prefix as a tensor. It is cached forever, because CUDA graphs may use it."""
    return torch.tensor([tokens], dtype=torch.int32).to(device)
