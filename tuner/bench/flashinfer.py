"""FlashInfer on packed sequences, and on keys and values in pages."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problem import Feature, Problem
from flashtune.tuner.execution.inputs import Tensors

FLASHINFER = "flashinfer"
COMPUTED = frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.PACKED, Feature.PAGES})
# The size of FlashInfer's workspace, in bytes, as in its documentation.
WORKSPACE = 128 * 2**20


def flashinfer_run(problem: Problem, tensors: Tensors) -> Callable[[], Tensor]:
    """Returns a run of a planned wrapper. Its output has heads before tokens.

    Plans are made once, as programs make them once for all layers. FlashInfer chooses its backend. Decoding
    uses its Tensor Core kernels.
    """
    module: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=tensors.q.device)
    # [tokens, heads, head_dim] of all sequences.
    q = tensors.q.transpose(1, 2).flatten(0, 1)
    options: dict[str, Any] = {
        "window_left": -1 if problem.window_left is None else problem.window_left,
        "logits_soft_cap": tensors.side.softcap,
        "q_data_type": q.dtype,
        "kv_data_type": tensors.k.dtype,
        "sm_scale": tensors.scale,
    }
    heads = problem.heads, problem.kv_heads, problem.head_dim
    options_of_prefill = {"causal": problem.is_causal, "head_dim_vo": problem.value_head_dim}
    # Without a tensor for it, some wrappers clear the output in each run.
    room = q.new_empty(*q.shape[:2], problem.value_head_dim)
    wrapper: Any
    cache: tuple[Any, ...]
    if not problem.page_size:
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = tensors.side.cu_seqlens_q, tensors.side.cu_seqlens_kv
        wrapper.plan(*starts, *heads, **options_of_prefill, **options)
        cache = tuple(tensor.transpose(1, 2).flatten(0, 1) for tensor in (tensors.k, tensors.v))
    else:
        pages, size = _pages(problem, tensors), problem.page_size
        cache = (tuple(tensor.transpose(1, 2) for tensor in (tensors.k, tensors.v)),)
        if problem.seqlen_q == 1 and not problem.packed:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *heads, size, **options)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            first = _starts(problem, tensors)
            wrapper.plan(first, *pages, *heads, size, **options_of_prefill, **options)

    def run() -> Tensor:
        batch, _, rows, _ = tensors.q.shape
        out: Tensor = wrapper.run(q, *cache, out=room)
        return out.view(batch, rows, *out.shape[1:]).transpose(1, 2)

    return run


def _pages(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where the pages of sequences begin, all pages, and the number of keys in each last page."""
    side = tensors.side
    assert side.block_table is not None
    assert side.seqlens_kv is not None
    lengths, size = side.seqlens_kv.cpu(), problem.page_size
    counts = (lengths + size - 1) // size
    used = [row[:count] for row, count in zip(side.block_table.cpu(), counts.tolist(), strict=True)]
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    last = lengths - (counts - 1).clamp(min=0) * size
    device = tensors.q.device
    return starts.to(device), torch.cat(used).to(device), last.to(device)


def _starts(problem: Problem, tensors: Tensors) -> Tensor:
    """Returns where the queries of sequences begin, int32 [batch + 1]."""
    if tensors.side.cu_seqlens_q is not None:
        return tensors.side.cu_seqlens_q
    count, device = problem.batch + 1, tensors.q.device
    return torch.arange(count, dtype=torch.int32, device=device) * problem.seqlen_q
