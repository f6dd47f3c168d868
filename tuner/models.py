"""The attention shapes of well-known open models, so that a search can name a model."""

from __future__ import annotations

import msgspec

from flashtune.errors import UsageError
from flashtune.problem import Causal, Dtype, Problem
from flashtune.tuner.shape_values import Value, nearest, parse_values, quoted
from flashtune.tuner.shapes import expand


class ModelAttention(msgspec.Struct, frozen=True):
    """The attention layers of one model, as its prefill runs them.

    Attributes:
        name: How a user names it: lower case, with its size.
        layers: How many layers with attention.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of queries and keys.
        value_head_dim: Width of values.
        dtype: The checkpoint's element type.
        causal: Whether a token sees only what came before it.
        source: Where the numbers are from.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: Dtype
    causal: bool
    source: str


def _decoder(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    repository: str,
    dtype: Dtype = Dtype.BF16,
    value_head_dim: int = 0,
) -> ModelAttention:
    source = f"config.json of {repository}"
    widths = head_dim, value_head_dim or head_dim
    return ModelAttention(name, layers, heads, kv_heads, *widths, dtype, True, source)


def _encoder(
    name: str, layers: int, heads: int, head_dim: int, repository: str, dtype: Dtype
) -> ModelAttention:
    source = f"config.json of {repository}"
    return ModelAttention(name, layers, heads, heads, head_dim, head_dim, dtype, False, source)


# Layers with a sliding window, sinks or a soft cap on logits are listed by their sizes alone: the
# shape is right, the feature is not searched.
MODELS: tuple[ModelAttention, ...] = (
    _decoder("llama-2-7b", 32, 32, 32, 128, "meta-llama/Llama-2-7b-hf", Dtype.FP16),
    _decoder("llama-2-13b", 40, 40, 40, 128, "meta-llama/Llama-2-13b-hf", Dtype.FP16),
    _decoder("llama-2-70b", 80, 64, 8, 128, "meta-llama/Llama-2-70b-hf", Dtype.FP16),
    _decoder("llama-3-8b", 32, 32, 8, 128, "meta-llama/Meta-Llama-3-8B"),
    _decoder("llama-3-70b", 80, 64, 8, 128, "meta-llama/Meta-Llama-3-70B"),
    _decoder("llama-3.1-8b", 32, 32, 8, 128, "meta-llama/Llama-3.1-8B"),
    _decoder("llama-3.1-70b", 80, 64, 8, 128, "meta-llama/Llama-3.1-70B"),
    _decoder("llama-3.1-405b", 126, 128, 8, 128, "meta-llama/Llama-3.1-405B"),
    _decoder("llama-3.2-1b", 16, 32, 8, 64, "meta-llama/Llama-3.2-1B"),
    _decoder("llama-3.2-3b", 28, 24, 8, 128, "meta-llama/Llama-3.2-3B"),
    _decoder("llama-3.3-70b", 80, 64, 8, 128, "meta-llama/Llama-3.3-70B-Instruct"),
    _decoder("mistral-7b", 32, 32, 8, 128, "mistralai/Mistral-7B-v0.3"),
    _decoder("mistral-nemo-12b", 40, 32, 8, 128, "mistralai/Mistral-Nemo-Base-2407"),
    _decoder("mixtral-8x7b", 32, 32, 8, 128, "mistralai/Mixtral-8x7B-v0.1"),
    _decoder("mixtral-8x22b", 56, 48, 8, 128, "mistralai/Mixtral-8x22B-v0.1"),
    _decoder("qwen2.5-0.5b", 24, 14, 2, 64, "Qwen/Qwen2.5-0.5B"),
    _decoder("qwen2.5-1.5b", 28, 12, 2, 128, "Qwen/Qwen2.5-1.5B"),
    _decoder("qwen2.5-3b", 36, 16, 2, 128, "Qwen/Qwen2.5-3B"),
    _decoder("qwen2.5-7b", 28, 28, 4, 128, "Qwen/Qwen2.5-7B"),
    _decoder("qwen2.5-14b", 48, 40, 8, 128, "Qwen/Qwen2.5-14B"),
    _decoder("qwen2.5-32b", 64, 40, 8, 128, "Qwen/Qwen2.5-32B"),
    _decoder("qwen2.5-72b", 80, 64, 8, 128, "Qwen/Qwen2.5-72B"),
    _decoder("qwen3-0.6b", 28, 16, 8, 128, "Qwen/Qwen3-0.6B"),
    _decoder("qwen3-1.7b", 28, 16, 8, 128, "Qwen/Qwen3-1.7B"),
    _decoder("qwen3-4b", 36, 32, 8, 128, "Qwen/Qwen3-4B"),
    _decoder("qwen3-8b", 36, 32, 8, 128, "Qwen/Qwen3-8B"),
    _decoder("qwen3-14b", 40, 40, 8, 128, "Qwen/Qwen3-14B"),
    _decoder("qwen3-32b", 64, 64, 8, 128, "Qwen/Qwen3-32B"),
    _decoder("qwen3-30b-a3b", 48, 32, 4, 128, "Qwen/Qwen3-30B-A3B"),
    _decoder("qwen3-235b-a22b", 94, 64, 4, 128, "Qwen/Qwen3-235B-A22B"),
    _decoder("gemma-2b", 18, 8, 1, 256, "google/gemma-2b"),
    _decoder("gemma-7b", 28, 16, 16, 256, "google/gemma-7b"),
    _decoder("gemma-3-1b", 26, 4, 1, 256, "google/gemma-3-1b-pt"),
    _decoder("gemma-3-12b", 48, 16, 8, 256, "google/gemma-3-12b-pt"),
    _decoder("gemma-3-27b", 62, 32, 16, 128, "google/gemma-3-27b-pt"),
    _decoder("phi-2", 32, 32, 32, 80, "microsoft/phi-2", Dtype.FP16),
    _decoder("phi-3-mini", 32, 32, 32, 96, "microsoft/Phi-3-mini-4k-instruct"),
    _decoder("phi-4", 40, 40, 10, 128, "microsoft/phi-4"),
    _decoder("falcon-7b", 32, 71, 1, 64, "tiiuae/falcon-7b"),
    _decoder("falcon-40b", 60, 128, 8, 64, "tiiuae/falcon-40b"),
    _decoder("yi-6b", 32, 32, 4, 128, "01-ai/Yi-6B"),
    _decoder("yi-34b", 60, 56, 8, 128, "01-ai/Yi-34B"),
    _decoder("deepseek-v2-lite", 27, 16, 16, 192, "deepseek-ai/DeepSeek-V2-Lite", value_head_dim=128),
    _decoder("deepseek-v3", 61, 128, 128, 192, "deepseek-ai/DeepSeek-V3", value_head_dim=128),
    _decoder("gpt-oss-20b", 24, 64, 8, 64, "openai/gpt-oss-20b"),
    _decoder("gpt-oss-120b", 36, 64, 8, 64, "openai/gpt-oss-120b"),
    _decoder("gpt-neox-20b", 44, 64, 64, 96, "EleutherAI/gpt-neox-20b", Dtype.FP16),
    _decoder("gpt2", 12, 12, 12, 64, "openai-community/gpt2", Dtype.FP32),
    _encoder("bert-base", 12, 12, 64, "google-bert/bert-base-uncased", Dtype.FP32),
    _encoder("bert-large", 24, 16, 64, "google-bert/bert-large-uncased", Dtype.FP32),
    _encoder("vit-large", 24, 16, 64, "google/vit-large-patch16-224", Dtype.FP32),
)


def find_model(name: str) -> ModelAttention:
    """The model of a name, case and underscores aside.

    Raises:
        UsageError: The table has no such model.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for model in MODELS:
        if model.name == wanted:
            return model
    raise UsageError(
        f"there is no model {quoted(name)}: pass its config.json by --hf-config, "
        f"or {nearest(wanted, (model.name for model in MODELS))}"
    )


def prefill(attention: ModelAttention, *, seqlen: str, batch: str, dtype: str | None) -> tuple[Problem, ...]:
    """The problems of a whole prompt attending to itself.

    Args:
        attention: The model's attention.
        seqlen: Lengths, as a shape writes them.
        batch: Batch sizes, as a shape writes them.
        dtype: Element types, as a shape writes them; None for the checkpoint's own.

    Raises:
        UsageError: A length, size or type that no shape can have.
    """
    own: dict[str, tuple[Value, ...]] = {
        "heads": (attention.heads,),
        "kv_heads": (attention.kv_heads,),
        "head_dim": (attention.head_dim,),
        "value_head_dim": (attention.value_head_dim,),
        "causal": (Causal.BOTTOM_RIGHT if attention.causal else Causal.NONE,),
    }
    return expand(
        own
        | {
            "seqlen": parse_values("seqlen", seqlen),
            "batch": parse_values("batch", batch),
            "dtype": parse_values("dtype", dtype) if dtype else (attention.dtype,),
        }
    )
