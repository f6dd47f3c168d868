"""Attention with all features in plain torch, with the rounding and the tensors of a kernel.

It reads lengths, tables and scales itself, sequence by sequence; mistakes are put into its inputs.
"""

import msgspec
import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Causal, Problem


class PlainConfig(Config, frozen=True):
    """The tile that cases are made for."""

    block_m: int = 16
    block_n: int = 16
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int = 0


class DecodingConfig(Config, frozen=True):
    """Likewise of a decoding kernel."""

    block_n: int = 16
    num_splits: int = 3
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int = 0


def attend(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    side: ExtraInputs,
) -> None:
    """Fills `out`, and `lse` where there is one, of heads-first tensors."""
    for sequence in range(problem.batch):
        rows = query_rows(problem, sequence, side)
        block = 0 if problem.packed else sequence
        own_q = q[block, :, rows]
        if not own_q.shape[1]:
            continue
        keys, k_factor = _keys(problem, k, sequence, side, side.k_scale)
        values, v_factor = _keys(problem, v, sequence, side, side.v_scale)
        head = torch.arange(problem.heads) // problem.group_size
        products = own_q.float() @ (keys.to(own_q.dtype).float()[head]).mT
        scores = products * scale * k_factor[head][:, None]
        scores = _changed(problem, scores, sequence, side)
        weights, total, largest = _softmax(scores, side)
        low = (weights * v_factor[head][:, None]).to(own_q.dtype).float()
        result = low @ values.to(own_q.dtype).float()[head] / total.masked_fill(total == 0, 1.0)[..., None]
        out[block, :, rows] = result.to(out.dtype)
        if lse is not None:
            lse[block, :, rows] = largest + total.log()


def _softmax(scores: Tensor, side: ExtraInputs) -> tuple[Tensor, Tensor, Tensor]:
    largest = scores.amax(-1) if scores.shape[-1] else torch.full(scores.shape[:-1], -torch.inf)
    if side.sinks is not None:
        largest = largest.maximum(side.sinks[:, None])
    shift = largest.masked_fill(largest.isneginf(), 0.0)
    weights = (scores - shift[..., None]).exp()
    total = weights.sum(-1)
    if side.sinks is not None:
        total = total + (side.sinks[:, None] - shift).exp()
    return weights, total, shift


def query_rows(problem: Problem, sequence: int, side: ExtraInputs) -> slice:
    if side.cu_seqlens_q is None:
        return slice(0, problem.seqlen_q)
    return slice(int(side.cu_seqlens_q[sequence]), int(side.cu_seqlens_q[sequence + 1]))


def key_count(problem: Problem, sequence: int, side: ExtraInputs) -> int:
    if side.seqlens_kv is not None:
        return int(side.seqlens_kv[sequence])
    if side.cu_seqlens_kv is not None:
        return int(side.cu_seqlens_kv[sequence + 1] - side.cu_seqlens_kv[sequence])
    return problem.seqlen_kv


def _keys(
    problem: Problem, tensor: Tensor, sequence: int, side: ExtraInputs, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sequence's keys or values, [kv_heads, keys, width], and the factor of each, [kv_heads, keys]."""
    count = key_count(problem, sequence, side)
    if side.block_table is not None:
        table, needed = side.block_table, -(-count // problem.page_size)
        first_entry = table.storage_offset() + sequence * table.stride(0)
        pages = table.as_strided((needed,), (1,), first_entry).long()
        rows = torch.cat([_page(tensor, int(page)) for page in pages], 1) if count else tensor[0]
    elif side.cu_seqlens_kv is not None:
        first = int(side.cu_seqlens_kv[sequence])
        rows = tensor[0, :, first:]
    else:
        rows = tensor[sequence]
    rows = _first(rows, count)
    if scale is None or problem.kv_dtype is None:
        return rows, torch.ones(problem.kv_heads, count)
    if side.block_table is not None and count:
        factor = scale[pages % len(scale)].repeat_interleave(problem.page_size, 0)[:count].T
    else:
        factor = scale[0 if side.block_table is not None else sequence][:, None].expand(-1, count)
    return rows, factor


def _page(tensor: Tensor, page: int) -> Tensor:
    """A page of the pool, or the poison before and after it."""
    strides = tensor.stride()
    offset = tensor.storage_offset() + page * strides[0]
    return tensor.as_strided(tuple(tensor.shape[1:]), strides[1:], offset)


def _first(rows: Tensor, count: int) -> Tensor:
    """The first rows, [heads, count, width], followed by the memory after the last."""
    shape = (rows.shape[0], count, rows.shape[2])
    return rows.as_strided(shape, rows.stride(), rows.storage_offset())


def _changed(problem: Problem, scores: Tensor, sequence: int, side: ExtraInputs) -> Tensor:
    heads, queries, keys = scores.shape
    query, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    position = query if problem.causal is Causal.TOP_LEFT else query + keys - queries
    if side.softcap is not None:
        scores = side.softcap * torch.tanh(scores / side.softcap)
    if side.slopes is not None:
        scores = scores - side.slopes[sequence][:, None, None] * (position - key).abs()
    hidden = torch.zeros(heads, queries, keys, dtype=torch.bool)
    hidden |= out_of_sight(problem, position, key, sequence, side)
    if side.bias is not None:
        bias = side.bias[sequence, :, :queries, :keys]
        if problem.bias is Bias.BOOLEAN:
            hidden |= ~bias
        else:
            scores = scores + bias.float()
    return scores.masked_fill(hidden, float("-inf"))


def out_of_sight(problem: Problem, position: Tensor, key: Tensor, sequence: int, side: ExtraInputs) -> Tensor:
    far = torch.zeros(1, 1, dtype=torch.bool)
    if problem.window_left is not None:
        far = far | (position - key > problem.window_left)
    if problem.chunk:
        apart = torch.div(key, problem.chunk, rounding_mode="floor") - torch.div(
            position, problem.chunk, rounding_mode="floor"
        )
        far = far | (apart < 0 if problem.causal is not Causal.NONE else apart != 0)
    hidden = far & (key >= problem.sink_tokens)
    if problem.causal is not Causal.NONE:
        hidden = hidden | (key > position)
    elif problem.window_right is not None:
        hidden = hidden | (key - position > problem.window_right)
    if side.prefix is not None:
        hidden = hidden & (key >= side.prefix[sequence])
    return hidden


def changed(problem: Problem, **fields: object) -> Problem:
    """A problem that a kernel mistakes for another."""
    return msgspec.structs.replace(problem, **fields)
