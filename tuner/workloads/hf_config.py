"""Reads attention layers from a transformers `config.json` of any origin as typed data."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from flashtune.core.errors import UsageError, quoted
from flashtune.core.problem import Dtype
from flashtune.tuner.workloads.models import Latent, Layers, ModelAttention
from flashtune.tuner.workloads.shape_values import DTYPES, MAX_COUNT, MAX_LENGTH, MAX_WIDTH
from flashtune.tuner.workloads.shapes_file import read_text

MAX_LAYERS = 10_000
Text = Annotated[str, msgspec.Meta(max_length=100)]
Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
Interval = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, msgspec.Meta(ge=1, le=MAX_WIDTH)]

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# If a config with windows lists no layer types, the last of every so many layers has no window.
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
CHUNK_INTERVAL = 4
# Models with a learned sink per head, which no field of a config contains.
WITH_SINKS = frozenset({"gpt_oss"})

LayerCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]

# Model types with bidirectional attention.
ENCODERS = frozenset({"bert", "roberta", "distilbert", "electra", "modernbert", "vit", "siglip_vision_model"})


class _Attention(msgspec.Struct, frozen=True):
    """The fields that decide attention's shape, with the names of the configs.

    Without a number of layers, one layer is assumed.
    """

    num_hidden_layers: LayerCount | None = None
    n_layer: LayerCount | None = None
    num_attention_heads: Heads | None = None
    n_head: Heads | None = None
    num_key_value_heads: Heads | None = None
    num_kv_heads: Heads | None = None
    multi_query: bool | None = None
    new_decoder_architecture: bool | None = None
    hidden_size: Heads | None = None
    n_embd: Heads | None = None
    head_dim: Width | None = None
    qk_nope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    dtype: Text | None = None
    torch_dtype: Text | None = None
    model_type: Text | None = None
    layer_types: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LAYERS)] | None = None
    sliding_window: Length | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Length | None = None
    sliding_window_pattern: Interval | None = None
    attention_chunk_size: Length | None = None
    no_rope_layer_interval: Interval | None = None
    attn_logit_softcapping: float | None = None
    kv_lora_rank: Width | None = None
    qk_rope_head_dim: Width | None = None


class _Document(_Attention, frozen=True):
    """A whole config. Multimodal models store their language model's in `text_config`."""

    text_config: _Attention | None = None


def layers_of(fields: _Attention, layers: int, path: Path) -> tuple[Layers, ...]:
    """Returns the kinds of a model's layers, each with its count."""
    counts = Counter(fields.layer_types) if fields.layer_types else _counts(fields, layers)
    window = fields.sliding_window or 0
    chunk = fields.attention_chunk_size or 0
    softcap, sinks = bool(fields.attn_logit_softcapping), fields.model_type in WITH_SINKS
    sizes = {WINDOWED: (window, 0), CHUNKED: (0, chunk), FULL: (0, 0)}
    # Layers of other types, such as recurrent ones, compute no attention.
    kinds = tuple(
        Layers(counts[kind], *size, softcap, sinks) for kind, size in sizes.items() if counts.get(kind)
    )
    if not kinds:
        named = ", ".join(map(quoted, list(counts)[:3]))
        raise UsageError(f"the model config {path} has layers of {named} alone: none of them attends")
    return kinds


def _counts(fields: _Attention, layers: int) -> dict[str, int]:
    """Returns the number of layers of each type for a config that does not list them."""
    if fields.attention_chunk_size:
        full = layers // (fields.no_rope_layer_interval or CHUNK_INTERVAL)
        return {CHUNKED: layers - full, FULL: full}
    if not fields.sliding_window or fields.use_sliding_window is False:
        return {FULL: layers}
    pattern = fields.sliding_window_pattern or PATTERNS.get(fields.model_type or "")
    if pattern:
        full = layers // pattern
    else:
        # With windows switched on, Qwen 2's first layers have none.
        full = min(layers, fields.max_window_layers or 0) if fields.use_sliding_window else 0
    return {WINDOWED: layers - full, FULL: full}


def latent_of(fields: _Attention, path: Path) -> Latent | None:
    """Returns the latent keys of a config's cache, None if it has none."""
    if not fields.kv_lora_rank or not fields.qk_rope_head_dim:
        return None
    width = fields.kv_lora_rank + fields.qk_rope_head_dim
    if width > MAX_WIDTH:
        raise UsageError(f"the model config {path} has latent keys {width} wide: at most {MAX_WIDTH} will do")
    return Latent(width, fields.kv_lora_rank)


def read_hf_config(path: Path) -> ModelAttention:
    """Returns the attention shape of a config file."""
    content = read_text(path, "model config")
    try:
        document = msgspec.json.decode(content, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"the model config {path} cannot be used: {error}") from error
    return _attention(document, path)


def _attention(document: _Document, path: Path) -> ModelAttention:
    text = document.text_config
    nested = text is not None and (text.num_attention_heads or text.n_head)
    config = text if text is not None and nested else document
    heads = config.num_attention_heads or config.n_head
    if heads is None:
        raise UsageError(
            f"the model config {path} has no num_attention_heads: pass a transformer's config.json"
        )
    head_dim = _head_dim(config, heads, path)
    return ModelAttention(
        name=config.model_type or path.stem,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        value_head_dim=config.v_head_dim or head_dim,
        dtype=_dtype(config.dtype or config.torch_dtype or document.dtype or document.torch_dtype, path),
        causal=config.model_type not in ENCODERS,
        source=str(path),
        kinds=layers_of(config, config.num_hidden_layers or config.n_layer or 1, path),
        latent=latent_of(config, path),
    )


def _kv_heads(config: _Attention, heads: int) -> int:
    # Falcon's first generation sets multi_query, and a num_kv_heads that it ignores.
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    if config.qk_nope_head_dim:
        return heads  # multi-head latent attention, as expanded in prefill
    return config.num_key_value_heads or config.num_kv_heads or heads


def _head_dim(config: _Attention, heads: int, path: Path) -> int:
    if config.qk_nope_head_dim and config.qk_rope_head_dim:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.head_dim:
        return config.head_dim
    hidden = config.hidden_size or config.n_embd
    if hidden is None:
        raise UsageError(f"the model config {path} has neither head_dim nor hidden_size: add one of the two")
    if hidden % heads or hidden // heads > MAX_WIDTH:
        raise UsageError(
            f"the model config {path} has hidden_size {hidden} for {heads} heads: add its head_dim"
        )
    return hidden // heads


def _dtype(name: str | None, path: Path) -> Dtype:
    if name is None or name == "auto":
        return Dtype.BF16
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise UsageError(
            f"the model config {path} has dtype {quoted(name)}: flashtune takes bf16, fp16 and fp32"
        )
    return dtype
