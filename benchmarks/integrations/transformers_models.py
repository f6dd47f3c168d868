"""Speed of models with flashtune and with the best attention of transformers, interleaved on a GPU.

    python -m benchmarks.integrations.transformers_models --save out/transformers_models.json

The layers have the shapes of Gemma 3 4B (windows), gpt-oss 20B (sinks and windows; 4 experts) and T5 large (a
bias). Models have few layers, random weights in bf16 and a vocabulary of 2,048 tokens. Each of transformers'
implementations runs first. The fastest one is then measured in turn with flashtune, after kernels were
prepared. Each figure is the median of the rounds. The compiler of `flex_attention` takes most of the time:
`--usual sdpa eager` leaves it out.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import flashtune.integrations
import flashtune.integrations.transformers
from benchmarks.integrations.models import COMMON, VOCABULARY, WARM_UPS, elapsed, model_of, passes
from benchmarks.saved import save
from flashtune.integrations.host_library import host_library

ROUNDS = 9
# Runs of each of transformers' implementations, of which the fastest counts.
TRIALS = 3
IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
# The classes of models and configs, the options, and the batch and length of both workloads.
MODELS: dict[str, tuple[tuple[str, str], dict[str, Any], tuple[int, int]]] = {
    "Gemma 3": (
        ("Gemma3ForCausalLM", "Gemma3TextConfig"),
        COMMON
        | {
            "max_position_embeddings": 16384,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        (1, 8192),
    ),
    "gpt-oss": (
        ("GptOssForCausalLM", "GptOssConfig"),
        COMMON
        | {
            "max_position_embeddings": 16384,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
        (1, 4096),
    ),
    "T5": (
        ("T5ForConditionalGeneration", "T5Config"),
        {
            "vocab_size": VOCABULARY,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_layers": 6,
            "num_heads": 16,
            "dropout_rate": 0.0,
            "eos_token_id": None,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        (8, 512),
    ),
}


class Row(msgspec.Struct, frozen=True):
    """The times of one workload."""

    workload: str  # Its name.
    usual: str  # The fastest of transformers' implementations.
    usual_ms: tuple[float, ...]  # Its times, in ms, by round.
    flashtune_ms: tuple[float, ...]  # Times with flashtune, likewise.
    speedup: float  # Ratio of their medians.
    # The least time of each implementation in the trials, or the reason why it has none.
    trials: dict[str, float | str]
    transformers: str  # Version of transformers.


def main() -> None:
    """Measures all workloads, prints their times and saves them."""
    parser = argparse.ArgumentParser(description="Speed of models with transformers and with flashtune.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the times to FILE, in JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--usual", nargs="+", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    options = parser.parse_args()
    transformers = host_library("transformers", *flashtune.integrations.transformers.NEEDED)
    ours = flashtune.integrations.transformers.register()
    rows = []
    for name in options.models:
        classes, configured, size = MODELS[name]
        model = model_of(transformers, classes, configured, "eager").eval()
        for workload, run in passes(model, size).items():
            row = measured(f"{name}, {workload}", model, run, ours, options, transformers.__version__)
            rows.append(row)
            medians = (statistics.median(times) for times in (row.usual_ms, row.flashtune_ms))
            text = "{:<28}{:<16}{:9.2f} ms{:9.2f} ms{:9.3f}"
            print(text.format(row.workload, row.usual, *medians, row.speedup), flush=True)
            if options.save:
                save(options.save, rows)
        del model, run
        gc.collect()
        torch.cuda.empty_cache()


def use(model: Any, implementation: str) -> None:
    """Selects an implementation of attention in all parts of a model, which may have copies of its config."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation


def measured(
    name: str, model: Any, run: Callable[[], None], ours: str, options: argparse.Namespace, version: str
) -> Row:
    """Returns a workload's times with the fastest of transformers' implementations and with flashtune."""
    trials: dict[str, float | str] = {}
    for backend in options.usual:
        if not getattr(
            model, {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(backend, ""), True
        ):
            trials[backend] = "the model does not support it"
            continue
        use(model, backend)
        try:
            run()
            trials[backend] = min(elapsed(run) for _ in range(TRIALS))
        except Exception as failure:  # noqa: BLE001 - an implementation that fails is not the best one
            trials[backend] = f"{type(failure).__name__}: {failure}"[:200]
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
    times = {backend: ms for backend, ms in trials.items() if isinstance(ms, float)}
    fastest = min(times, key=lambda backend: times[backend])
    use(model, ours)
    for _ in range(WARM_UPS):
        run()
        flashtune.integrations.wait()
    samples: dict[str, list[float]] = {fastest: [], ours: []}
    for number in range(-1, options.rounds):
        for backend in (fastest, ours) if number % 2 else (ours, fastest):
            use(model, backend)
            ms = elapsed(run)
            if number >= 0:
                samples[backend].append(ms)
    theirs, own = tuple(samples[fastest]), tuple(samples[ours])
    return Row(
        name, fastest, theirs, own, statistics.median(theirs) / statistics.median(own), trials, version
    )


if __name__ == "__main__":
    main()
