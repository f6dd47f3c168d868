"""Features of problems, and their kernel arguments in the interpreter."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, KvDtype, KvScale, Problem
from tests.problems.backward_calls import FEATURES as BOTH_PASSES
from tests.problems.backward_calls import LENGTHS

FEATURES: dict[str, dict[str, Any]] = {
    **BOTH_PASSES,
    "pages": {"page_size": 16},
    "pages_of_1": {"page_size": 1},
    "large_pages": {"page_size": 64},
    "int8_tensor": {"kv_dtype": KvDtype.INT8},
    "e4m3_head": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD},
    "int8_page": {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE, "page_size": 32},
    "e4m3_page": {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "page_size": 16},
}


class Call(NamedTuple):
    """The arguments of a kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    side: ExtraInputs
    scale: float = 0.3


def make_call(problem: Problem) -> Call:
    """Tensors and side inputs of a problem: packed and paged ones have the sequences of `LENGTHS`."""
    ragged = problem.packed > 0 or problem.page_size > 0
    lengths = LENGTHS if ragged else [(problem.seqlen_q, problem.seqlen_kv)] * problem.batch
    queries, keys = ([one[axis] for one in lengths] for axis in (0, 1))
    if problem.page_size and not problem.packed:
        queries, keys = [problem.seqlen_q] * 3, keys[:3]
    if problem.kv_lengths:
        keys = [problem.seqlen_kv - 7 * index for index in range(len(keys))]
    batch = len(keys)
    dense_q = (1, sum(queries)) if problem.packed else (batch, problem.seqlen_q)
    q = torch.randn(dense_q[0], dense_q[1], problem.heads, problem.head_dim).transpose(1, 2)
    k, v, table = make_keys(problem, keys)
    pages = k.shape[0] if problem.page_size else batch
    side = ExtraInputs(
        k_scale=make_scale(problem, pages),
        v_scale=make_scale(problem, pages),
        slopes=torch.rand(batch, problem.heads) if problem.alibi else None,
        bias=make_bias(problem, batch, max(keys)),
        sinks=torch.randn(problem.heads) * 3 if problem.sinks else None,
        prefix=torch.tensor([23, 0, 5, 9, 70][:batch], dtype=torch.int32) if problem.prefix else None,
        cu_seqlens_q=starts(queries) if problem.packed else None,
        cu_seqlens_kv=starts(keys) if problem.packed and not problem.page_size else None,
        seqlens_kv=torch.tensor(keys, dtype=torch.int32) if problem.kv_lengths or problem.page_size else None,
        block_table=table,
        seed=torch.randint(2**63 - 1, (1,)) if problem.dropout else None,
        softcap=1.5 if problem.softcap else None,
        dropout=0.3 if problem.dropout else None,
    )
    return Call(q, k, v, side)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def stored(problem: Problem, *shape: int) -> Tensor:
    if problem.kv_dtype is KvDtype.INT8:
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    values = torch.randn(shape)
    return values.to(torch.float8_e4m3fn) if problem.kv_dtype is KvDtype.E4M3 else values


def unused(problem: Problem, *shape: int) -> Tensor:
    """The poison outside of sequences: it would change any sum."""
    if problem.kv_dtype is KvDtype.INT8:
        return torch.full(shape, 127, dtype=torch.int8)
    nothing = torch.full(shape, torch.nan)
    return nothing.to(torch.float8_e4m3fn) if problem.kv_dtype is KvDtype.E4M3 else nothing


def make_keys(problem: Problem, keys: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v, and the block table of pages, with invalid entries after a sequence's pages."""
    widths = (problem.head_dim, problem.value_head_dim)
    heads = problem.kv_heads
    if problem.page_size:
        return make_pages(problem, keys)
    if problem.packed:
        k, v = (stored(problem, 1, sum(keys), heads, width).transpose(1, 2) for width in widths)
        return k, v, None
    # Keys behind the lengths on the device are there, and no sequence's.
    k, v = (unused(problem, len(keys), heads, problem.seqlen_kv, width) for width in widths)
    for index, length in enumerate(keys):
        k[index, :, :length] = stored(problem, heads, length, widths[0])
        v[index, :, :length] = stored(problem, heads, length, widths[1])
    return k, v, None


def make_pages(problem: Problem, keys: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    size, heads = problem.page_size, problem.kv_heads
    counts = [-(-length // size) for length in keys]
    order = torch.randperm(sum(counts) + 3)
    widths = (problem.head_dim, problem.value_head_dim)
    # Positions before heads in a page, as vLLM has them, or heads first.
    shapes = [(len(order), size, heads, width) for width in widths]
    k, v = (unused(problem, *shape).transpose(1, 2) for shape in shapes)
    if problem.head_dim % 16:
        k, v = k.contiguous(), v.contiguous()
    table = torch.full((len(keys), max(counts) + 2), 2**30, dtype=torch.int32)
    used = iter(order.tolist())
    for index, (length, count) in enumerate(zip(keys, counts, strict=True)):
        for place in range(count):
            page = next(used)
            table[index, place] = page
            filled = min(size, length - place * size)
            k[page, :, :filled] = stored(problem, heads, filled, widths[0])
            v[page, :, :filled] = stored(problem, heads, filled, widths[1])
    return k, v, table


def make_scale(problem: Problem, first: int) -> Tensor | None:
    if problem.kv_dtype is None:
        return None
    unit = 2.0**-6 if problem.kv_dtype is KvDtype.INT8 else 1.0
    if problem.kv_scale is KvScale.TENSOR:
        return torch.tensor([[0.75 * unit]]).expand(first, problem.kv_heads)
    if problem.kv_scale is KvScale.HEAD:
        return (unit * (0.5 + torch.rand(1, problem.kv_heads))).expand(first, problem.kv_heads)
    return unit * 2.0 ** torch.randint(-2, 3, (first, problem.kv_heads))


def make_bias(problem: Problem, batch: int, keys: int) -> Tensor | None:
    shape = (batch, problem.heads, problem.seqlen_q, keys)
    if problem.bias is Bias.NONE:
        return None
    if problem.bias is Bias.ADDITIVE:
        bias = torch.randn(shape)
        bias[torch.rand(shape) < 0.3] = -torch.inf
    else:
        bias = torch.rand(shape) < 0.6
    # Rows that see nothing, and keys that no row sees, the first block among them.
    bias[:, 0, 3:9] = False if problem.bias is Bias.BOOLEAN else -torch.inf
    bias[..., :20] = False if problem.bias is Bias.BOOLEAN else -torch.inf
    return bias
