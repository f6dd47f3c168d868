"""Objects that vLLM passes to its attention backends."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.problems.serving_batches import E4M3, HEADS, KV_HEADS, PAGE, Batch, Case


def packed_cache(batch: Batch, dtype: torch.dtype, tokens_first: bool = False) -> Tensor:
    """A cache [pages, kv_heads, page_size, 2 * head_dim], physically of either order; fp8 as bytes."""
    pages, width = int(batch.table.max()) + 1, 2 * batch.width
    if tokens_first:
        return torch.zeros(pages, PAGE, KV_HEADS, width, dtype=dtype).transpose(1, 2)
    return torch.zeros(pages, KV_HEADS, PAGE, width, dtype=dtype)


def split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values of a cache, with elements of fp8 in place of bytes."""
    pages = cache.view(E4M3) if cache.dtype is torch.uint8 else cache
    keys, values = pages.split(pages.shape[-1] // 2, -1)
    return keys, values


def common(batch: Batch, padding: int = 0, **changes: Any) -> SimpleNamespace:
    """vLLM's metadata of a batch."""
    fields = {
        "query_start_loc": batch.starts,
        "query_start_loc_cpu": batch.starts,
        "seq_lens": batch.seqlens,
        "seq_lens_cpu_upper_bound": batch.seqlens,
        "num_reqs": len(batch.lengths),
        "num_actual_tokens": int(batch.starts[-1]) + padding,
        "max_query_len": batch.longest,
        "max_seq_len": int(batch.seqlens.max()),
        "block_table_tensor": torch.nn.functional.pad(batch.table, (0, 29)),
        "slot_mapping": batch.slots,
        "causal": True,
        "is_prefilling": torch.tensor([new > 1 for _, new in batch.lengths]),
    }
    return SimpleNamespace(**(fields | changes))


def layer_of(vllm: Any, batch: Batch, case: Case, **options: Any) -> Any:
    """The implementation of a layer."""
    return vllm.Impl(
        HEADS,
        batch.width,
        batch.scale,
        KV_HEADS,
        case.slopes,
        case.window,
        logits_soft_cap=case.softcap,
        sinks=case.sinks,
        **options,
    )


def scales_of(case: Case, device: str = "cpu") -> SimpleNamespace:
    """The layer's scales of an fp8 cache."""
    return SimpleNamespace(
        _k_scale=torch.tensor(case.k_scale, device=device), _v_scale=torch.tensor(case.v_scale, device=device)
    )


def builder(vllm: Any, **layers: Any) -> Any:
    """The builder of a group of layers, given by their names."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
    )
    return vllm.Builder(SimpleNamespace(block_size=PAGE), [*layers], config, torch.device("cpu"))
