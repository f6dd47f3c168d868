"""The layers of a transformers `config.json` with windows, chunks, softcaps or sinks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from flashtune.core.errors import UsageError
from flashtune.tuner.workloads.models import Latent, Layers
from flashtune.tuner.workloads.shape_values import MAX_LENGTH, MAX_WIDTH, quoted

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


class LayerFields(msgspec.Struct, frozen=True):
    """The fields that distinguish layers, with the names of the configs."""

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


def layers_of(fields: LayerFields, layers: int, path: Path) -> tuple[Layers, ...]:
    """Returns the kinds of a model's layers, each with its count.

    Args:
        fields: The config's fields.
        layers: Number of layers.
        path: The config, for messages.

    Raises:
        UsageError: None of its layers computes attention.
    """
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
        known = ", ".join(map(quoted, list(counts)[:3]))
        raise UsageError(f"the model config {path} has layers of {known} alone: none of them attends")
    return kinds


def _counts(fields: LayerFields, layers: int) -> dict[str, int]:
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


def latent_of(fields: LayerFields, path: Path) -> Latent | None:
    """Returns the latent keys of a config's cache, None if it has none.

    Raises:
        UsageError: They are wider than kernels support.
    """
    if not fields.kv_lora_rank or not fields.qk_rope_head_dim:
        return None
    width = fields.kv_lora_rank + fields.qk_rope_head_dim
    if width > MAX_WIDTH:
        raise UsageError(f"the model config {path} has latent keys {width} wide: at most {MAX_WIDTH} will do")
    return Latent(width, fields.kv_lora_rank)
