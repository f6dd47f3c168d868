"""Tiny models of twelve architectures with random weights, and their outputs and gradients with padding."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

VOCABULARY = 64
BATCH, LENGTH = 2, 12
# Padded tokens of the second sequence.
PADDING = 5
WINDOW = 6
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
HEADS = {"head_dim": 16}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# The usual implementation takes no float64. All experts are chosen, since a choice would depend on rounding.
EXPERTS = {"experts_implementation": "eager"}
ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Architecture(NamedTuple):
    """One architecture."""

    model: str  # Name of the class of its models.
    config: str  # Name of the class of its configs.
    options: dict[str, Any]  # Options of the tiny model's config.
    usual: str = "sdpa"  # Transformers' implementation that computes all of it.
    kind: str = "decoder"  # "decoder", "encoder", "images", "text to text" or "audio to text".

    @property
    def generates(self) -> bool:
        return self.kind not in ("encoder", "images")


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER | HEADS),
    "mistral": Architecture(
        "MistralForCausalLM", "MistralConfig", DECODER | HEADS | {"sliding_window": WINDOW}
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        DECODER | HEADS | LAYERS | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
        "eager",
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        DECODER | HEADS | LAYERS | {"query_pre_attn_scalar": 16},
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        DECODER | HEADS | LAYERS | {"num_local_experts": 2, "num_experts_per_tok": 2} | EXPERTS,
        "eager",
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", DECODER | HEADS),
    "phi": Architecture(
        "PhiForCausalLM",
        "PhiConfig",
        DECODER | {"hidden_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "partial_rotary_factor": 0.5},
    ),
    "deepseek": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DECODER
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
        },
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 1,
        },
        kind="text to text",
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 64,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
        },
        kind="audio to text",
    ),
    "bert": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0},
        kind="encoder",
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        ENCODER | {"image_size": 16, "patch_size": 4, "num_labels": 5},
        kind="images",
    ),
}


class Passes(NamedTuple):
    """The logits of valid tokens, and the gradients of the weights by name."""

    logits: Tensor
    gradients: dict[str, Tensor]


def model_of(
    transformers: Any,
    name: str,
    implementation: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A model with an implementation of attention. Its weights are large enough to make attention uneven."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, architecture.config)(
        **(architecture.options | changes), attn_implementation=implementation
    )
    model = getattr(transformers, architecture.model)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 or weight.numel() == 4:  # 4 are the sinks of all heads
                scale = 1.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model.eval().to(device=device, dtype=dtype)


def inputs_of(
    name: str, side: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Inputs with padding on the left or on the right, with a hole, or without padding ("none")."""
    kind = ARCHITECTURES[name].kind
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    places = {"left": slice(0, PADDING), "right": slice(-PADDING, None), "hole": slice(3, PADDING)}
    if side != "none":
        mask[1, places[side]] = 0
    ids = ids.masked_fill(mask == 0, 0)
    if kind == "images":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).to(device, dtype)}
    own = {"input_ids": ids, "attention_mask": mask}
    if kind in ("text to text", "audio to text"):
        target = torch.randint(2, VOCABULARY, (BATCH, LENGTH - 4), generator=generator)
        own |= {"decoder_input_ids": target}
        if side == "right":
            target_mask = torch.ones_like(target)
            target_mask[0, -2:] = 0
            own |= {"decoder_attention_mask": target_mask}
    if kind == "audio to text":
        del own["input_ids"], own["attention_mask"]
        return {
            "input_features": torch.randn(BATCH, 8, 20, generator=generator).to(device, dtype),
            **{key: value.to(device) for key, value in own.items()},
        }
    return {key: value.to(device) for key, value in own.items()}


def passes_of(model: Any, inputs: dict[str, Tensor], **options: Any) -> Passes:
    """The forward and backward pass of a loss over valid tokens."""
    model.zero_grad(set_to_none=True)
    logits = model(**inputs, **options).logits
    mask = inputs.get("decoder_attention_mask")
    if mask is None and "decoder_input_ids" not in inputs:
        mask = inputs.get("attention_mask")
    if mask is not None:
        logits = logits[mask.bool()]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape, generator=generator).to(logits)
    (logits * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Passes(logits.detach(), gradients)


def error(passes: Passes, want: Passes) -> tuple[float, float]:
    """The errors of the logits and of all gradients, as ratios of norms."""
    assert passes.gradients.keys() == want.gradients.keys()
    return distance([passes.logits], [want.logits]), distance(
        list(passes.gradients.values()), [want.gradients[name] for name in passes.gradients]
    )


def distance(tensors: list[Tensor], want: list[Tensor]) -> float:
    """The norm of the difference, relative to that of the second tensors. Nan if a tensor has one."""
    apart = sum(
        (tensor.double() - other.double()).square().sum() for tensor, other in zip(tensors, want, strict=True)
    )
    size = sum(tensor.double().square().sum() for tensor in want)
    return float((apart / size) ** 0.5)


@contextlib.contextmanager
def exact_softmax() -> Iterator[None]:
    """Eager attention computes the softmax of float64 scores in float64."""
    original: Callable[..., Tensor] = torch.nn.functional.softmax

    def softmax(scores: Tensor, *args: Any, **options: Any) -> Tensor:
        if scores.dtype is torch.float64:
            options.pop("dtype", None)
        return original(scores, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


def reference(model: Any, inputs: dict[str, Tensor]) -> Passes:
    """The passes of a float64 model with the attention that computes all of its architecture."""
    with exact_softmax():
        return passes_of(model, inputs)


def generated(model: Any, inputs: dict[str, Tensor], tokens: int, **options: Any) -> Tensor:
    """Greedily generated tokens."""
    prompt = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    sequences: Tensor = model.generate(
        **prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
    )
    return sequences
