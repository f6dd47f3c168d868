"""Known models as rows of a table."""

from __future__ import annotations

from flashtune.tuner.models import Layers, ModelAttention

MODEL_HEADS = ("model", "layers", "heads, KV heads, head dim", "type", "from")


def model_row(model: ModelAttention) -> tuple[str, ...]:
    """A model's cells, one for each of `MODEL_HEADS`."""
    width = str(model.head_dim)
    if model.value_head_dim != model.head_dim:
        width += f" (values {model.value_head_dim})"
    mask = "" if model.causal else ", not causal"
    sizes = f"{model.heads}, {model.kv_heads}, {width}{mask}"
    if model.latent:
        sizes += f"; decode {model.heads}, 1, {model.latent.width} (values {model.latent.values})"
    layers = " and ".join(map(_kind, model.kinds))
    return model.name, layers, sizes, model.dtype.value, model.source


def _kind(kind: Layers) -> str:
    """Layers of one kind: how many, and what they ask for."""
    words = (
        f"window {kind.window}" if kind.window else "",
        f"chunk {kind.chunk}" if kind.chunk else "",
        "softcap" if kind.softcap else "",
        "sinks" if kind.sinks else "",
    )
    asked = ", ".join(word for word in words if word)
    return f"{kind.count} with {asked}" if asked else str(kind.count)
