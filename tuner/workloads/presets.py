"""The attention layers of well-known open models."""

from flashtune.core.errors import UsageError, nearest, quoted
from flashtune.core.problem import Dtype
from flashtune.tuner.workloads.models import Latent, Layers, ModelAttention

Kinds = int | tuple[Layers, ...]
Widths = int | tuple[int, int]


def _model(
    name: str,
    layers: Kinds,
    heads: int,
    kv_heads: int,
    widths: Widths,
    repository: str,
    dtype: Dtype = Dtype.BF16,
    *,
    causal: bool = True,
    latent: Latent | None = None,
    checked: bool = False,
) -> ModelAttention:
    """Returns a row of the table. `widths` are those of keys and values if these differ.

    Rows with `checked` were compared with copies of the config in public repositories, with kinds of layers.
    """
    key_width, value_width = widths if isinstance(widths, tuple) else (widths, widths)
    kinds = layers if isinstance(layers, tuple) else (Layers(layers),)
    source = f"config.json of {repository}{', checked against public copies' if checked else ''}"
    return ModelAttention(name, heads, kv_heads, key_width, value_width, dtype, causal, source, kinds, latent)


def _encoder(
    name: str, layers: int, heads: int, head_dim: int, repository: str, dtype: Dtype
) -> ModelAttention:
    return _model(name, layers, heads, heads, head_dim, repository, dtype, causal=False)


def _gemma_2(layers: int) -> tuple[Layers, ...]:
    """Every second layer has a window, and all have a softcap."""
    half = layers // 2
    return Layers(half, window=4096, softcap=True), Layers(half, softcap=True)


def _gemma_3(layers: int, window: int) -> tuple[Layers, ...]:
    """Every sixth layer has no window."""
    full = layers // 6
    return Layers(layers - full, window=window), Layers(full)


def _gpt_oss(layers: int) -> tuple[Layers, ...]:
    """Every second layer has a window, and all have sinks."""
    half = layers // 2
    return Layers(half, window=128, sinks=True), Layers(half, sinks=True)


# Every fourth layer has no chunks.
LLAMA_4 = (Layers(36, chunk=8192), Layers(12))
MISTRAL = (Layers(32, window=4096),)
PHI_3 = (Layers(32, window=2047),)
MLA = Latent(512 + 64, 512)

MODELS: tuple[ModelAttention, ...] = (
    _model("llama-2-7b", 32, 32, 32, 128, "meta-llama/Llama-2-7b-hf", Dtype.FP16),
    _model("llama-2-13b", 40, 40, 40, 128, "meta-llama/Llama-2-13b-hf", Dtype.FP16),
    _model("llama-2-70b", 80, 64, 8, 128, "meta-llama/Llama-2-70b-hf", Dtype.FP16),
    _model("llama-3-8b", 32, 32, 8, 128, "meta-llama/Meta-Llama-3-8B"),
    _model("llama-3-70b", 80, 64, 8, 128, "meta-llama/Meta-Llama-3-70B"),
    _model("llama-3.1-8b", 32, 32, 8, 128, "meta-llama/Llama-3.1-8B"),
    _model("llama-3.1-70b", 80, 64, 8, 128, "meta-llama/Llama-3.1-70B"),
    _model("llama-3.1-405b", 126, 128, 8, 128, "meta-llama/Llama-3.1-405B"),
    _model("llama-3.2-1b", 16, 32, 8, 64, "meta-llama/Llama-3.2-1B"),
    _model("llama-3.2-3b", 28, 24, 8, 128, "meta-llama/Llama-3.2-3B"),
    _model("llama-3.3-70b", 80, 64, 8, 128, "meta-llama/Llama-3.3-70B-Instruct"),
    _model("llama-4-scout", LLAMA_4, 40, 8, 128, "meta-llama/Llama-4-Scout-17B-16E", checked=True),
    _model("llama-4-maverick", LLAMA_4, 40, 8, 128, "meta-llama/Llama-4-Maverick-17B-128E", checked=True),
    _model("mistral-7b-v0.1", MISTRAL, 32, 8, 128, "mistralai/Mistral-7B-v0.1", checked=True),
    _model("mistral-7b", 32, 32, 8, 128, "mistralai/Mistral-7B-v0.3"),
    _model("mistral-nemo-12b", 40, 32, 8, 128, "mistralai/Mistral-Nemo-Base-2407"),
    _model("mixtral-8x7b", 32, 32, 8, 128, "mistralai/Mixtral-8x7B-v0.1"),
    _model("mixtral-8x22b", 56, 48, 8, 128, "mistralai/Mixtral-8x22B-v0.1"),
    _model("qwen2.5-0.5b", 24, 14, 2, 64, "Qwen/Qwen2.5-0.5B"),
    _model("qwen2.5-1.5b", 28, 12, 2, 128, "Qwen/Qwen2.5-1.5B"),
    _model("qwen2.5-3b", 36, 16, 2, 128, "Qwen/Qwen2.5-3B"),
    _model("qwen2.5-7b", 28, 28, 4, 128, "Qwen/Qwen2.5-7B"),
    _model("qwen2.5-14b", 48, 40, 8, 128, "Qwen/Qwen2.5-14B"),
    _model("qwen2.5-32b", 64, 40, 8, 128, "Qwen/Qwen2.5-32B"),
    _model("qwen2.5-72b", 80, 64, 8, 128, "Qwen/Qwen2.5-72B"),
    _model("qwen3-0.6b", 28, 16, 8, 128, "Qwen/Qwen3-0.6B"),
    _model("qwen3-1.7b", 28, 16, 8, 128, "Qwen/Qwen3-1.7B"),
    _model("qwen3-4b", 36, 32, 8, 128, "Qwen/Qwen3-4B"),
    _model("qwen3-8b", 36, 32, 8, 128, "Qwen/Qwen3-8B"),
    _model("qwen3-14b", 40, 40, 8, 128, "Qwen/Qwen3-14B"),
    _model("qwen3-32b", 64, 64, 8, 128, "Qwen/Qwen3-32B"),
    _model("qwen3-30b-a3b", 48, 32, 4, 128, "Qwen/Qwen3-30B-A3B"),
    _model("qwen3-235b-a22b", 94, 64, 4, 128, "Qwen/Qwen3-235B-A22B"),
    _model("gemma-2b", 18, 8, 1, 256, "google/gemma-2b"),
    _model("gemma-7b", 28, 16, 16, 256, "google/gemma-7b"),
    _model("gemma-2-2b", _gemma_2(26), 8, 4, 256, "google/gemma-2-2b", checked=True),
    _model("gemma-2-9b", _gemma_2(42), 16, 8, 256, "google/gemma-2-9b", checked=True),
    _model("gemma-2-27b", _gemma_2(46), 32, 16, 128, "google/gemma-2-27b", checked=True),
    _model("gemma-3-1b", _gemma_3(26, 512), 4, 1, 256, "google/gemma-3-1b-pt", checked=True),
    _model("gemma-3-4b", _gemma_3(34, 1024), 8, 4, 256, "google/gemma-3-4b-pt", checked=True),
    _model("gemma-3-12b", _gemma_3(48, 1024), 16, 8, 256, "google/gemma-3-12b-pt", checked=True),
    _model("gemma-3-27b", _gemma_3(62, 1024), 32, 16, 128, "google/gemma-3-27b-pt", checked=True),
    _model("phi-2", 32, 32, 32, 80, "microsoft/phi-2", Dtype.FP16),
    _model("phi-3-mini", PHI_3, 32, 32, 96, "microsoft/Phi-3-mini-4k-instruct", checked=True),
    _model("phi-4", 40, 40, 10, 128, "microsoft/phi-4"),
    _model("falcon-7b", 32, 71, 1, 64, "tiiuae/falcon-7b"),
    _model("falcon-40b", 60, 128, 8, 64, "tiiuae/falcon-40b"),
    _model("yi-6b", 32, 32, 4, 128, "01-ai/Yi-6B"),
    _model("yi-34b", 60, 56, 8, 128, "01-ai/Yi-34B"),
    _model("deepseek-v2-lite", 27, 16, 16, (192, 128), "deepseek-ai/DeepSeek-V2-Lite", latent=MLA),
    _model("deepseek-v3", 61, 128, 128, (192, 128), "deepseek-ai/DeepSeek-V3", latent=MLA, checked=True),
    _model("gpt-oss-20b", _gpt_oss(24), 64, 8, 64, "openai/gpt-oss-20b", checked=True),
    _model("gpt-oss-120b", _gpt_oss(36), 64, 8, 64, "openai/gpt-oss-120b", checked=True),
    _model("gpt-neox-20b", 44, 64, 64, 96, "EleutherAI/gpt-neox-20b", Dtype.FP16),
    _model("gpt2", 12, 12, 12, 64, "openai-community/gpt2", Dtype.FP32),
    _encoder("bert-base", 12, 12, 64, "google-bert/bert-base-uncased", Dtype.FP32),
    _encoder("bert-large", 24, 16, 64, "google-bert/bert-large-uncased", Dtype.FP32),
    _encoder("vit-large", 24, 16, 64, "google/vit-large-patch16-224", Dtype.FP32),
)


def find_model(name: str) -> ModelAttention:
    """Returns the model of a name, ignoring case and underscores."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for model in MODELS:
        if model.name == wanted:
            return model
    # Names of different models are similar: gpt-5 and gpt2.
    names = (model.name for model in MODELS)
    near = nearest(wanted, names, cutoff=0.8, others="choose a name that `flashtune models` lists")
    raise UsageError(f"there is no model {quoted(name)}: pass its config.json by --hf-config, or {near}")
