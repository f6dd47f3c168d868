"""The attention backend that vLLM loads, as `vllm_backend.Backend`.

The classes here have no base classes. Their subclasses that extend vLLM's are made when one is first used.
"""

# vLLM passes more to some methods than they need.
# ruff: noqa: ARG002, ARG003, ARG004

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flashtune.core.canonical import rounded_up
from flashtune.core.errors import ProblemError
from flashtune.core.problem import MAX_HEAD_DIM, PAGE_SIZES
from flashtune.integrations.host_library import host_attribute, host_subclass
from flashtune.integrations.paged_batch import (
    PagedBatch,
    cache_call,
    packed_call,
    prepare,
    unordered_reason,
    window_of,
    with_regular_strides,
)
from flashtune.integrations.vllm import LEAST, NAME
from flashtune.kv_cache.append import append_rows
from flashtune.kv_cache.layout import Pool
from flashtune.recording.callers import called_by
from flashtune.request.call import Call
from flashtune.runtime.call_cache import write_call
from flashtune.runtime.torch_modes import is_tracing, runs_eagerly
from flashtune.runtime.torch_ops import attend

# Objects of vLLM.
Capability = Any
CommonMetadata = Any
Layer = Any

# Types of the KV cache that hold the model's own elements, by the model's type. "auto" is any of them.
PLAIN = {"float16": torch.float16, "bfloat16": torch.bfloat16}
E4M3 = ("fp8", "fp8_e4m3")
# Numbers of sequences of the prompts whose kernels are prepared.
PREPARED_BATCHES = (1, 8)
# vLLM's pages are multiples of it.
SMALLEST_PAGE = 16
# Types of attention in vLLM.
DECODER = "decoder"
ENCODERS = ("encoder", "encoder_only")
ATTENTION_TYPES = (DECODER, *ENCODERS, "encoder_decoder")


def is_invariant() -> bool:
    """Returns whether vLLM's switch for batch invariance is set."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT") or "0"))


def host_classes() -> dict[str, Any]:
    """Returns the subclasses that extend vLLM's classes, by name."""
    module = "vllm.v1.attention.backend"
    made = {
        "Backend": host_subclass("Backend", Configurations, module, "AttentionBackend", LEAST),
        "Builder": host_subclass("Builder", BatchBuilder, module, "AttentionMetadataBuilder", LEAST),
        "Impl": host_subclass("Impl", LayerAttention, module, "AttentionImpl", LEAST),
    }
    made["Builder"]._cudagraph_support = host_attribute(module, "AttentionCGSupport", LEAST).ALWAYS
    return made


def __getattr__(name: str) -> Any:
    if name in {"Backend", "Builder", "Impl"}:
        return host_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Configurations:
    """The configurations that flashtune serves."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *PLAIN, *E4M3]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        """Returns the name by which the backend is selected."""
        return NAME

    @staticmethod
    def get_impl_cls() -> Any:
        """Returns the class of a layer's attention."""
        return host_classes()["Impl"]

    @staticmethod
    def get_builder_cls() -> Any:
        """Returns the class that prepares batches."""
        return host_classes()["Builder"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Returns the page sizes of kernels."""
        return [size for size in PAGE_SIZES if size >= SMALLEST_PAGE]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether kernels compute a head dim."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True: learned logits per head are supported."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Returns True: sliding windows are supported."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Returns True: fp8 caches may have one scale per KV head."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns True: with `VLLM_BATCH_INVARIANT=1`, calls of all layers are batch-invariant."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Returns True: decoders, encoders and cross-attention are supported."""
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_compute_capability(cls, capability: Capability) -> bool:
        """Returns whether the GPU is sm_80 or newer."""
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Capability,
    ) -> str | None:
        """Returns why the type of the cache does not go with the model's type or the GPU, or None."""
        if PLAIN.get(kv_cache_dtype or "", dtype) is not dtype:
            return f"a KV cache of {kv_cache_dtype} needs a model of this type"
        if is_invariant():
            stored = torch.float8_e4m3fn if kv_cache_dtype in E4M3 else dtype
            return unordered_reason(head_size, dtype, stored, tuple(device_capability))
        if kv_cache_dtype in E4M3 and tuple(device_capability) < (8, 9):
            return "a KV cache in fp8 needs sm_89 or newer"
        return None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Returns all layouts. The first one has the rows of a page and a head next to one another."""
        layouts = host_attribute("vllm.v1.kv_cache_layout", "KVCacheLayout", LEAST)
        return layouts.LBHNC, *(layout for layout in layouts if layout is not layouts.LBHNC)


class Part(NamedTuple):
    """Some sequences of a batch, which one call computes."""

    first: int  # The first of their tokens.
    batch: PagedBatch  # The sequences over the paged cache.


# vLLM copies the fields of this class and sets others, so it is neither frozen nor a tuple.
@dataclass
class Metadata:
    """One batch, shared by all layers of a group."""

    num_actual_tokens: int  # Tokens without padding. Their queries come first.
    starts: Tensor  # Offsets of the sequences' queries, int32 [batch + 1].
    max_query_len: int  # Queries of the longest sequence, or more.
    # Sequences that decode, and the others. A single part if the host may not distinguish them.
    parts: tuple[Part, ...]
    # Slots of the new keys, int64 [tokens]. vLLM replaces it for cross-attention.
    slot_mapping: Tensor
    causal: bool  # Whether queries see no later keys.


class BatchBuilder:
    """Prepares batches. Lengths stay on the GPU, so graphs of any batches may be captured and replayed."""

    # Sequences with one query come first.
    reorder_batch_threshold: int | None = 1
    supports_update_block_table = True
    # Decoding batches have only views of vLLM's own buffers.
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Stores the arguments. vLLM's class is the next one."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._layers = [*layer_names]
        self._config = vllm_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonMetadata, fast_build: bool = False
    ) -> Metadata:
        """Returns the metadata of a batch, with parts if it has prompts. Batches of graphs have none."""
        metadata = self._build(common_attn_metadata)
        if _has_prompts(common_attn_metadata):
            metadata.parts = tuple(_split(common_attn_metadata, metadata.parts[0].batch))
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonMetadata) -> Metadata:
        """Returns the metadata of a batch whose graph is replayed with other lengths.

        Before the first capture, the kernels of prompts are prepared.
        """
        layers = self._config.compilation_config.static_forward_context
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        while self._layers:
            layer = layers[self._layers.pop()]
            layer.impl.prepare(layer, common_attn_metadata.block_table_tensor, max_tokens)
        return self._build(common_attn_metadata)

    def _build(self, common: CommonMetadata) -> Metadata:
        """Returns the metadata of a batch as one part, with views of vLLM's buffers alone."""
        if isinstance(common.causal, Tensor):
            raise ProblemError(
                "each sequence has its own causal flag: flashtune takes one for a batch, "
                "select another attention backend"
            )
        requests, tokens, longest = common.num_reqs, common.num_actual_tokens, common.max_query_len
        starts = common.query_start_loc[: requests + 1]
        tables = common.block_table_tensor[:requests], common.seq_lens[:requests]
        # With one token for each sequence, row i is the query of sequence i.
        is_decoding = longest == 1 and tokens == requests
        part = Part(0, PagedBatch(*tables, None if is_decoding else starts, longest))
        return Metadata(tokens, starts, longest, (part,), common.slot_mapping, common.causal)

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """Returns the metadata of the same batch in another group of layers."""
        parts, row = [], 0
        for first, batch in metadata.parts:
            rows = len(batch.seqlens_k)
            parts.append(Part(first, batch._replace(block_table=blk_table[row : row + rows])))
            row += rows
        # vLLM adds attributes, so the object itself is copied.
        other = copy.copy(metadata)
        other.parts, other.slot_mapping = tuple(parts), slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Does nothing, because the metadata has views of the buffers that vLLM updates."""


@called_by("vllm")
def write(output: Tensor, call: Call) -> None:
    """Computes a call and writes its result to a tensor."""
    if runs_eagerly(call.q, call.k, call.v) and not is_tracing():
        write_call(output, call)
        return
    result = attend(call)
    assert isinstance(result, Tensor)
    output.copy_(result)


def _has_prompts(common: CommonMetadata) -> bool:
    """Returns whether a sequence of the batch is in its prompt, which no captured batch is."""
    prompts = common.is_prefilling
    return prompts is not None and not prompts.is_cuda and bool(prompts.any())


def _split(common: CommonMetadata, batch: PagedBatch) -> Iterator[Part]:
    """Yields the first sequences with one query each, and the others. Each part has its own kernels."""
    requests = common.num_reqs
    queries = common.query_start_loc_cpu[: requests + 1].diff()
    longer = (queries != 1).nonzero()
    ones = int(longer[0]) if len(longer) else requests
    table, lengths = batch.block_table, batch.seqlens_k
    if ones:
        yield Part(0, PagedBatch(table[:ones], lengths[:ones], None))
    if ones == requests:
        return
    starts = common.query_start_loc[ones : requests + 1]
    starts = starts - ones if ones else starts
    bounds = common.seq_lens_cpu_upper_bound
    # A bound that equals the number of queries is exact, because a sequence has at least these keys.
    is_fresh = bounds is not None and bool((queries == bounds[:requests])[ones:].all())
    yield Part(ones, PagedBatch(table[ones:], lengths[ones:], starts, common.max_query_len, is_fresh))


class LayerAttention:
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Reads the layer's options. `sliding_window` counts the query's own key."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._window = None if sliding_window is None else sliding_window - 1
        self._is_quantized = kv_cache_dtype in E4M3
        self._options: dict[str, Any] = {"scale": self.scale, "softcap": logits_soft_cap}
        # Chunks of a prompt read the cache. So does the whole prompt if that changes its keys.
        self._takes_new_keys = not (is_invariant() and self._is_quantized)
        self._options |= {"batch_invariant": True} if is_invariant() else {}
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: Layer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of new tokens to `output` and returns it.

        Args:
            layer: The layer, which has the scales of an fp8 cache.
            query: [tokens, heads, head_size], padded.
            key: [tokens, kv_heads, head_size], or None if another layer or a fused kernel wrote it.
            value: Likewise.
            kv_cache: [pages, kv_heads, page_size, head_size of keys and of values], with the new tokens.
            attn_metadata: The batch. None in vLLM's profiling run, whose output is zero.
            output: [tokens, heads, head_size of values].
            output_scale: None.
            output_block_scale: None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flashtune's backend computes no quantized output")
        if attn_metadata is None:
            return output.fill_(0)
        tokens, causal = attn_metadata.num_actual_tokens, attn_metadata.causal
        options = self._options_of(query.device, causal)
        if self.attn_type in ENCODERS:
            assert key is not None
            assert value is not None
            new = query[:tokens], key[:tokens], value[:tokens]
            longest = attn_metadata.max_query_len
            write(output[:tokens], packed_call(*new, attn_metadata.starts, longest, options))
            return output
        pages = self._pages(kv_cache)
        scales = self._scales(layer)
        # A layer that shares the cache of another one has keys that attention does not see.
        has_keys = key is not None and self.kv_sharing_target_layer_name is None and self._takes_new_keys
        for part, (first, batch) in enumerate(attn_metadata.parts):
            is_last = part == len(attn_metadata.parts) - 1
            rows = slice(first, tokens if is_last else attn_metadata.parts[part + 1].first)
            q = query[rows]
            if batch.is_fresh and causal and has_keys:
                assert key is not None
                assert value is not None
                assert batch.cu_seqlens_q is not None
                # Kernels for packed sequences are faster than those for pages.
                starts, longest = batch.cu_seqlens_q, batch.max_seqlen_q
                call = packed_call(q, key[rows], value[rows], starts, longest, options)
            else:
                call = cache_call(q, *pages, batch, options | scales)
            write(output[rows], call)
        return output

    @called_by("vllm")
    def prepare(self, layer: Layer, block_table: Tensor, max_tokens: int) -> None:
        """Prepares the kernels of prompts of up to `max_tokens` tokens, so that no request waits for them.

        Kernels do not depend on lengths, but dispatch may select others for longer prompts.
        """
        if self.attn_type != DECODER:
            return
        device, dtype = block_table.device, layer.dtype
        pages, options = self._pages(layer.kv_cache), self._options_of(device, causal=True)
        value_size = pages[1].shape[-1]
        for batch in PREPARED_BATCHES:
            starts, lengths = block_table.new_zeros(batch + 1), block_table.new_zeros(batch)
            for tokens in (2**power for power in range(4, rounded_up(max_tokens).bit_length())):
                q = torch.empty(tokens, self.num_heads, self.head_size, dtype=dtype, device=device)
                k = q.new_empty(tokens, self.num_kv_heads, self.head_size)
                v = q.new_empty(tokens, self.num_kv_heads, value_size)
                prepare(packed_call(q, k, v, starts, tokens, options))
                table = block_table.new_zeros(batch, block_table.shape[1])
                sequences = PagedBatch(table, lengths, starts, tokens)
                prepare(cache_call(q, *pages, sequences, options | self._scales(layer)))

    def do_kv_cache_update(
        self, layer: Layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values to their slots. Slots of -1 are skipped."""
        if self.attn_type in ENCODERS:
            return
        keys, values = (Pool(pages) for pages in self._pages(kv_cache))
        if self._is_quantized:
            shape = keys.elements.shape[:2]
            keys = keys._replace(scale=layer._k_scale.expand(shape))
            values = values._replace(scale=layer._v_scale.expand(shape))
        tokens = min(slot_mapping.shape[0], key.shape[0])
        append_rows(key[:tokens], value[:tokens], keys, values, slot_mapping[:tokens])

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of the keys and the values of a cache, which has them next to one another."""
        # vLLM may free a cache and allocate another one, so no view is kept.
        pages = kv_cache.view(torch.float8_e4m3fn) if self._is_quantized else kv_cache
        pages = with_regular_strides(pages)
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def _scales(self, layer: Layer) -> dict[str, Tensor]:
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self._is_quantized else {}

    def _options_of(self, device: torch.device, causal: bool) -> dict[str, Any]:
        options = {**self._options, **window_of(self._window, causal), "causal": causal}
        if self.sinks is not None:
            # Weights may be updated, so they are converted in each call.
            options["sinks"] = self.sinks.detach().float()
        if self._slopes is not None:
            options["alibi_slopes"] = self._slopes = self._slopes.to(device)
        return options
