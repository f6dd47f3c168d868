"""The attention backend that SGLang uses, made by `make_backend`.

`ServingBackend` has no base class. Its subclass that extends SGLang's is made when it is first used.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.core.problem import PAGE_SIZES
from flashtune.integrations.host_library import host_attribute, host_subclass
from flashtune.integrations.paged_batch import (
    PagedBatch,
    cache_call,
    packed_call,
    rounded_pages,
    unordered_reason,
    window_of,
    with_regular_strides,
)
from flashtune.recording.callers import called_by
from flashtune.runtime.torch_ops import attend

# Before this version, backends have other methods for CUDA graphs.
LEAST = "0.5.23"

# Objects of SGLang.
ForwardBatch = Any
ModelRunner = Any
RadixAttention = Any

# Types of attention in which queries see later keys.
BOTH_WAYS = ("encoder_only", "decoder_bidirectional")


def backend_class() -> Any:
    """Returns the subclass that extends SGLang's class."""
    module = "sglang.srt.layers.attention.base_attn_backend"
    return host_subclass("Backend", ServingBackend, module, "AttentionBackend", LEAST)


def make_backend(runner: ModelRunner) -> Any:
    """Returns the backend of a model runner."""
    return backend_class()(runner)


class Metadata(NamedTuple):
    """One batch."""

    batch: PagedBatch  # The sequences over the cache.
    # The block table of layers with a window, if they have a pool of their own.
    window_table: Tensor | None = None
    window_slots: Tensor | None = None  # The slots of the new tokens in that pool.


class ServingBackend:
    """Attention by flashtune: extend and decode, over pools of keys and values in pages."""

    def __init__(self, runner: ModelRunner) -> None:
        """Reads the runner's configuration and pools."""
        super().__init__()
        reason = unsupported_reason(runner)
        if reason is not None:
            raise UsageError(f"flashtune's attention backend {reason}")
        self.page_size = runner.page_size
        self._is_invariant = bool(runner.server_args.enable_deterministic_inference)
        self.kv_cache_dtype = runner.kv_cache_dtype
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._chunk = getattr(runner, "attention_chunk_size", None)
        device, length = self._req_to_token.device, runner.model_config.context_len
        # The first slot of each page of the longest sequence.
        self._starts = torch.arange(0, length, self.page_size, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        pool = host_attribute("sglang.srt.mem_cache.base_swa_memory_pool", "BaseSWAKVPool", LEAST)
        self._has_window_pool = isinstance(self.token_to_kv_pool, pool)
        self._slots = host_attribute("sglang.srt.mem_cache.memory_pool", "KVWriteLoc", LEAST)
        self.forward_metadata: Metadata | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepares a batch outside of CUDA graphs."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        longest = int(forward_batch.seq_lens_cpu.max())
        pages = rounded_pages(longest, self.page_size)
        if mode.is_decode():
            self.forward_metadata = self._metadata(forward_batch, pages)
            return
        if not mode.is_extend_without_speculative():
            raise NotImplementedError(f"flashtune's attention backend does not serve batches of {mode}")
        starts = torch.nn.functional.pad(
            torch.cumsum(forward_batch.extend_seq_lens, dim=0, dtype=torch.int32), (1, 0)
        )
        metadata = self._metadata(forward_batch, pages)
        batch = metadata.batch._replace(
            cu_seqlens_q=starts,
            max_seqlen_q=int(max(forward_batch.extend_seq_lens_cpu)),
            is_fresh=not any(forward_batch.extend_prefix_lens_cpu),
        )
        self.forward_metadata = metadata._replace(batch=batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Does nothing: graphs compute their tables themselves."""

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Computes the tables of a decoding batch as part of its CUDA graph, for sequences of any length."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("flashtune's attention backend has CUDA graphs of decoding alone")
        self.forward_metadata = self._metadata(forward_batch, len(self._starts))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of padding sequences."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Returns the attention of new tokens, [tokens, heads · value_head_dim]."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    # Decoding has one new token per sequence.
    forward_decode = forward_extend

    def _metadata(self, forward_batch: ForwardBatch, pages: int) -> Metadata:
        """Returns the metadata of a decoding batch, for sequences of up to `pages` pages."""
        requests = forward_batch.req_pool_indices
        slots = self._req_to_token[requests[:, None], self._starts[:pages]]
        table = (slots // self.page_size).to(torch.int32)
        batch = PagedBatch(table, forward_batch.seq_lens.to(torch.int32), None)
        if not self._has_window_pool:
            return Metadata(batch)
        translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
        window_table = (translate(slots) // self.page_size).to(torch.int32)
        return Metadata(batch, window_table, translate(forward_batch.out_cache_loc))

    @called_by("sglang")
    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        names = sorted(name for name, value in others.items() if value is not None and value is not False)
        if names:
            raise NotImplementedError(f"flashtune's attention backend does not take {', '.join(names)}")
        metadata = self.forward_metadata
        assert metadata is not None
        if save_kv_cache and k is not None:
            slots = self._slots.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        options = self._options(layer, sinks)
        batch = metadata.batch
        # The pool divides keys by their scale in place, so they are used only without one.
        if batch.is_fresh and k is not None and v is not None and self.kv_cache_dtype is q.dtype:
            assert batch.cu_seqlens_q is not None
            result = attend(packed_call(q, k, v, batch.cu_seqlens_q, batch.max_seqlen_q, options))
        else:
            if metadata.window_table is not None and "window" in options:
                batch = batch._replace(block_table=metadata.window_table)
            keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            if self.kv_cache_dtype is torch.float8_e4m3fn:
                scales = (self._one if scale is None else scale for scale in (layer.k_scale, layer.v_scale))
                options |= zip(("k_scale", "v_scale"), scales, strict=True)
            result = attend(cache_call(q, self._paged(keys), self._paged(values), batch, options))
        assert isinstance(result, Tensor)
        return result.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _options(self, layer: RadixAttention, sinks: Tensor | None) -> dict[str, Any]:
        """Returns the options of a layer, whose window does not count the query's own key."""
        if layer.is_cross_attention or layer.xai_temperature_len > 0 or layer.logit_capping_method != "tanh":
            raise NotImplementedError(
                "flashtune's attention backend has neither cross-attention nor temperatures by position, "
                "and caps scores by tanh alone"
            )
        causal = layer.attn_type.value not in BOTH_WAYS
        window = layer.sliding_window_size
        options: dict[str, Any] = {"scale": layer.scaling, "causal": causal, "softcap": layer.logit_cap}
        if self._is_invariant:
            options["batch_invariant"] = True
        options |= window_of(window if window is not None and window > -1 else None, causal)
        if layer.use_irope and self._chunk is not None:
            options["chunk"] = self._chunk
        if sinks is not None:
            options["sinks"] = sinks.detach().float()
        return options

    def _paged(self, pool: Tensor) -> Tensor:
        """Returns a pool as [pages, kv_heads, page_size, width]. It holds rows of tokens, or such pages."""
        if pool.dim() == 3:
            pool = pool.view(-1, self.page_size, *pool.shape[1:]).transpose(1, 2)
        return with_regular_strides(pool)


def unsupported_reason(runner: ModelRunner) -> str | None:
    """Returns why a runner's configuration is not supported, or None."""
    if runner.use_mla_backend:
        return "does not serve latent keys (MLA): select another one"
    if runner.model_config.is_encoder_decoder:
        return "has no cross-attention: select another one"
    if runner.spec_algorithm.is_speculative():
        return "has no speculative decoding: select another one"
    if runner.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return f"takes pages of {sizes} tokens, and these have {runner.page_size}: pass --page-size 64"
    if runner.kv_cache_dtype not in {runner.dtype, torch.float8_e4m3fn}:
        return f"takes a KV cache of {runner.dtype} or fp8_e4m3, not {runner.kv_cache_dtype}"
    if runner.server_args.enable_deterministic_inference:
        types = runner.model_config.head_dim, runner.dtype, runner.kv_cache_dtype
        reason = unordered_reason(*types, torch.cuda.get_device_capability())
        return reason and f"cannot serve deterministically: {reason}"
    return None
