"""Combination of attention over two sets of keys by their log-sum-exps.

Paged attention reads a common prefix of all sequences once. All queries attend to the prefix as one sequence,
and each to its own suffix. Both results are merged.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtune.core.arguments import read_count
from flashtune.core.constant_tensors import constants
from flashtune.core.errors import ProblemError
from flashtune.core.features.table import FEATURES
from flashtune.core.layouts import LAYOUTS, WIDE_FLOATS, Layout
from flashtune.request.arguments import read_option
from flashtune.request.call import Call
from flashtune.request.read_call import require_tensors
from flashtune.request.request import Result
from flashtune.request.side_inputs import check_kinds
from flashtune.request.tensor_checks import require_dense
from flashtune.runtime.torch_ops import attend

# The inputs of features that depend on positions among all keys of a sequence.
POSITIONAL = [entry for feature in FEATURES.values() if feature.is_positional for entry in feature.inputs]


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of both parts.

    Args:
        out_a: Output over the first keys, [batch, heads, seqlen_q, head_dim] ("bshd": [batch, seqlen_q,
            heads, head_dim]; "thd", varlen: [tokens, heads, head_dim]; "bhd", one token per sequence: [batch,
            heads, head_dim]).
        lse_a: Natural log-sum-exp of out_a in float32, [batch, heads, seqlen_q], [heads, tokens] or [batch,
            heads]. -inf for rows without visible keys, or +inf as of the flash_attn functions.
        out_b: Output over the other keys.
        lse_b: Natural log-sum-exp of out_b.
        layout: Order of the dimensions of the outputs.

    Returns:
        The output and log-sum-exp over all keys, in the shapes of `out_a` and `lse_a`.

    Raises:
        ProblemError: The parts do not match one another, or the layout is unknown.
    """
    for name, part in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        require_dense(name, part)
        if part.dtype not in WIDE_FLOATS or part.device != out_a.device:
            raise ProblemError(
                f"{name} is {part.dtype} on {part.device} and out_a on {out_a.device}: pass 16, 32 "
                "or 64 bit floats on one device"
            )
    order = read_option("layout", layout, LAYOUTS)
    rows = tuple(out_a.shape[:-1])
    if order in (Layout.BSHD, Layout.THD):
        rows = (*rows[:-2], rows[-1], rows[-2])
    if out_a.shape != out_b.shape or not lse_a.shape == lse_b.shape == rows:
        raise ProblemError(
            f"outputs are {list(out_a.shape)} and {list(out_b.shape)}, log-sum-exps {list(lse_a.shape)} and "
            f"{list(lse_b.shape)}: pass two parts of one call in layout {order.value!r}"
        )
    parts = [lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b)]
    # A row without visible keys in both parts gets shares of 0. Its output and gradients stay zeros.
    hidden = (parts[0] == -torch.inf) & (parts[1] == -torch.inf)
    # Relative to the largest, because the sum of large log-sum-exps has no room for the logarithm of two.
    largest = torch.maximum(*parts).detach().masked_fill(hidden, 0.0)
    shares = [torch.exp(part - largest) for part in parts]
    total = (shares[0] + shares[1]).masked_fill(hidden, 1.0)
    shares = [share / total for share in shares]
    lse = (largest + total.log()).masked_fill(hidden, -torch.inf)
    if order in (Layout.BSHD, Layout.THD):
        shares = [share.transpose(-1, -2) for share in shares]
    out = out_a.float() * shares[0].unsqueeze(-1) + out_b.float() * shares[1].unsqueeze(-1)
    return out.to(out_a.dtype), lse


def attend_shared(call: Call, attends: Sequence[Callable[[Call], Result]] = (attend, attend)) -> Result:
    """Returns the attention of a paged call whose sequences have a shared prefix.

    Args:
        call: The call. Its prefix has whole pages, all before the first query.
        attends: Functions that compute the calls of `shared_calls`.

    Raises:
        ProblemError: The call cannot be split, or as `attention_paged`.
    """
    results = [serve(part) for serve, part in zip(attends, shared_calls(call), strict=False)]
    if len(results) == 1:
        return results[0]
    (seen, weight), (out, lse) = results
    layout = Layout(call.options.layout)
    out, lse = merge_attention(
        *_as_suffix(seen, weight, layout, call.q.shape[0]), out, lse, layout=call.options.layout
    )
    return (out, lse) if call.options.return_lse else out


def shared_calls(call: Call) -> tuple[Call, ...]:
    """Returns the calls for the prefix and for the suffix, or the call itself if there are no sequences.

    Raises:
        ProblemError: The call cannot be split.
    """
    require_tensors(call)
    if call.options.batch_invariant:
        raise ProblemError(
            "a shared prefix changes the bits of rows: leave out shared_prefix or batch_invariant"
        )
    check_kinds(call.side, call.q.device)
    tokens, pages = call.shared_prefix, _shared_pages(call, call.shared_prefix)
    call = call._replace(shared_prefix=0)
    if call.side.block_table is not None and not call.side.block_table.shape[0]:
        return (call,)
    return prefix_call(call, tokens, pages), suffix_call(call, tokens, pages)


def prefix_call(call: Call, tokens: int, pages: int) -> Call:
    """Returns a call of all queries, as one sequence, with the prefix as keys. Each query sees all keys."""
    q = call.q
    q = q.flatten(0, 1) if call.options.layout == Layout.BSHD else q
    assert call.side.block_table is not None
    side = call.side._replace(
        sinks=None,
        cu_seqlens_q=None,
        tree=None,
        seqlens_kv=constants((tokens,), 1, torch.int32, q.device)[0],
        block_table=call.side.block_table[:1, :pages],
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
        "score_mod or mask_mod": bool(options.functions),
        "window": options.window_left is not None or options.window_right is not None,
        "chunk": options.chunk > 0,
        **{
            feature_input.option: getattr(side, feature_input.name) is not None
            for feature_input in POSITIONAL
        },
        "causal='top_left'": options.causal == "top_left",
    }
    refused = [name for name, there in names.items() if there]
    if refused:
        raise ProblemError(f"shared_prefix does not go with {refused[0]}: leave out one of them")
    if side.block_table is None or side.block_table.dim() != 2 or side.block_table.shape[1] < tokens // size:
        raise ProblemError(
            f"shared_prefix is {tokens} and block_table has no {tokens // size} columns: share fewer tokens"
        )
    return tokens // size
