"""Objects that SGLang passes to its attention backends."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.problems.serving_batches import E4M3, HEADS, KV_HEADS, PAGE, Batch, Case

CONTEXT = 128


class KVPool:
    """A pool of rows of tokens, or of pages with heads first. Slots of windows are moved by `offset`."""

    def __init__(
        self,
        batch: Batch,
        dtype: torch.dtype,
        heads_first: bool = False,
        offset: int = 0,
        device: str = "cpu",
    ) -> None:
        pages = int(batch.table.max()) + 1 + offset // PAGE
        shape = (pages, KV_HEADS, PAGE, batch.width) if heads_first else (pages * PAGE, KV_HEADS, batch.width)
        self.buffers = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.heads_first, self.offset = heads_first, offset

    def pages(self) -> tuple[Tensor, Tensor]:
        """The buffers as [pages, kv_heads, page_size, head_dim]."""
        keys, values = self.buffers
        if self.heads_first:
            return keys, values
        shape = (-1, PAGE, *keys.shape[1:])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, ...]:
        return self.buffers

    def set_kv_buffer(self, layer: Any, slots: Any, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> None:
        places = slots[0] if slots[1] is None else slots[1]
        for kept, rows, scale in zip(self.pages(), (k, v), (k_scale, v_scale), strict=True):
            pages = kept
            if scale is not None:
                # As SGLang does.
                rows.div_(scale)
            stored = rows.to(pages.dtype)
            if pages.dtype is E4M3:
                # Some versions of torch cannot index 8-bit floats.
                pages, stored = pages.view(torch.uint8), stored.view(torch.uint8)
            pages[places // PAGE, :, places % PAGE] = stored

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return slots + self.offset


def rows_of(batch: Batch, context: int) -> Tensor:
    """The slots of requests, which have the rows 1, 2 and so on, in reverse order."""
    rows = torch.zeros(len(batch.lengths) + 1, context + 4, dtype=torch.int32)
    for request, pages in zip(requests(batch).tolist(), batch.table, strict=True):
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        rows[request, : len(slots)] = slots
    return rows


def runner_of(batch: Batch, pool: Any, context: int = CONTEXT, **changes: Any) -> SimpleNamespace:
    """A model runner."""
    rows = rows_of(batch, context).to(pool.buffers[0].device)
    fields = {
        "page_size": PAGE,
        "dtype": torch.float32,
        "kv_cache_dtype": pool.buffers[0].dtype,
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=rows),
        "model_config": SimpleNamespace(context_len=context, is_encoder_decoder=False, head_dim=batch.width),
        "use_mla_backend": False,
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
        "attention_chunk_size": None,
        "server_args": SimpleNamespace(enable_deterministic_inference=False),
    }
    return SimpleNamespace(**(fields | changes))


def requests(batch: Batch) -> Tensor:
    return torch.arange(len(batch.lengths), 0, -1)


def forward_batch(batch: Batch) -> SimpleNamespace:
    is_decoding = all(new <= 1 for _, new in batch.lengths)
    mode = SimpleNamespace(
        is_idle=lambda: False,
        is_decode=lambda: is_decoding,
        is_decode_or_idle=lambda: is_decoding,
        is_extend_without_speculative=lambda: not is_decoding,
    )
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=requests(batch),
        seq_lens=batch.seqlens.long(),
        seq_lens_cpu=batch.seqlens,
        out_cache_loc=batch.slots,
        extend_seq_lens=torch.tensor([new for _, new in batch.lengths]),
        extend_seq_lens_cpu=[new for _, new in batch.lengths],
        extend_prefix_lens_cpu=[total - new for total, new in batch.lengths],
    )


def layer_of(batch: Batch, case: Case, **changes: Any) -> SimpleNamespace:
    """A layer. SGLang's windows do not count the query's own key."""
    types = importlib.import_module("sglang.srt.layers.radix_attention").AttentionType
    fields = {
        "tp_q_head_num": HEADS,
        "qk_head_dim": batch.width,
        "v_head_dim": batch.width,
        "scaling": batch.scale,
        "layer_id": 0,
        "logit_cap": case.softcap or 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1 if case.window is None else case.window - 1,
        "is_cross_attention": False,
        "use_irope": False,
        "k_scale": None,
        "v_scale": None,
        "attn_type": types.DECODER if case.causal else types.ENCODER_ONLY,
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**(fields | changes))
