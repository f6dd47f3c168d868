"""Speed of a model with torch's attention and with flashtune, interleaved in one run on a GPU.

    python -m benchmarks.integrations.models --save out/models.json

The model has the shapes of Llama 3.2 1B, but random weights. Its vocabulary has 2,048 tokens, so that the
head takes little time. Each round measures transformers' `sdpa` attention and flashtune, after kernels were
prepared. flashtune serves through `flashtune.integrations.torch.activate()`. Workloads named "registered" use
the attention function of `flashtune.integrations.transformers.register()` instead. Each figure is the median
of the rounds. It takes about three minutes on an NVIDIA H200.
"""

import argparse
import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

import flashtune.integrations
import flashtune.integrations.torch
import flashtune.integrations.transformers
from benchmarks.saved import save
from flashtune.integrations.host_library import host_library

# The vocabulary of Llama 3.2 1B has 128,256 tokens.
VOCABULARY = 2048
ROUNDS = 6
# Runs that prepare the tuned records, the kernels, and their launches.
WARM_UPS = 3
PROMPT, NEW_TOKENS, FEW_TOKENS = 2048, 128, 32
# Random weights may choose any token, also one that ends the text.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "attention_dropout": 0.0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LLAMA = COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


class Row(msgspec.Struct, frozen=True):
    """The times of one workload."""

    workload: str  # Its name.
    sdpa_ms: tuple[float, ...]  # Times with torch's attention, in ms, by round.
    flashtune_ms: tuple[float, ...]  # Times with flashtune, likewise.
    speedup: float  # Ratio of their medians.
    transformers: str  # Version of transformers.


class Runs(NamedTuple):
    """The functions of one workload, with transformers' attention and with flashtune's."""

    sdpa: Callable[[], None]  # Runs the workload with transformers' attention.
    flashtune: Callable[[], None]  # Runs it with flashtune, within `context`.
    context: Callable[[], contextlib.AbstractContextManager[object]]  # Makes the context.


def main() -> None:
    """Measures all workloads, prints their times and saves them."""
    parser = argparse.ArgumentParser(description="Speed of a model with and without flashtune.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the times to FILE, in JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="workloads with one of these in their names"
    )
    options = parser.parse_args()
    transformers = host_library("transformers", *flashtune.integrations.transformers.NEEDED)
    ours = flashtune.integrations.transformers.register()
    names = ("LlamaForCausalLM", "LlamaConfig")
    models = [model_of(transformers, names, LLAMA, attention) for attention in ("sdpa", ours)]
    rows = []
    for name, runs in workloads(*models).items():
        if options.only and not any(text in name for text in options.only):
            continue
        rows.append(measured(name, runs, options.rounds, transformers.__version__))
        medians = (statistics.median(times) for times in (rows[-1].sdpa_ms, rows[-1].flashtune_ms))
        print("{:<36}{:9.2f} ms{:9.2f} ms{:9.3f}".format(name, *medians, rows[-1].speedup), flush=True)
    if options.save:
        save(options.save, rows)


def model_of(transformers: Any, names: tuple[str, str], options: dict[str, Any], attention: str) -> Any:
    """Returns a model in bf16 on the GPU, with one of transformers' attention functions.

    Args:
        transformers: The library.
        names: The classes of the model and of its config.
        options: Those of the config.
        attention: The name of the attention function.
    """
    torch.manual_seed(0)
    model, config = (getattr(transformers, name) for name in names)
    with torch.device("cuda"):
        return model(config(**options, attn_implementation=attention)).to(torch.bfloat16)


def tokens(batch: int, length: int) -> torch.Tensor:
    """Returns random tokens, the same for the same length."""
    generator = torch.Generator("cuda").manual_seed(length)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator, device="cuda")


def passes(model: Any, *sizes: tuple[int, int]) -> dict[str, Callable[[], None]]:
    """Returns the prefill and a step of training of a model, by name, for each batch and length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def prefill(ids: torch.Tensor) -> None:
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                model(ids, decoder_input_ids=ids, use_cache=False)
            else:
                model(ids, use_cache=False, logits_to_keep=1)

    def train(ids: torch.Tensor) -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {
        f"{run.__name__} {batch} x {length}": functools.partial(run, tokens(batch, length))
        for run in (prefill, train)
        for batch, length in sizes
    }


def workloads(model: Any, registered: Any) -> dict[str, Runs]:
    """Returns the functions to measure, by name, for models with `sdpa` and with flashtune's attention."""

    def generate(model: Any, count: int, step: int = 0, **options: Any) -> Callable[[], None]:
        """Generates `count` tokens. Each prompt is longer than the last one by `step`."""
        lengths = itertools.count(PROMPT, step)

        def run() -> None:
            ids = tokens(8, next(lengths))
            with torch.no_grad():
                model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options)

        return run

    def activated(run: Callable[[], None]) -> Runs:
        return Runs(run, run, flashtune.integrations.torch.activate)

    def both(**options: Any) -> Runs:
        return Runs(generate(model, **options), generate(registered, **options), contextlib.nullcontext)

    long, short = f"generate 8 x {PROMPT}+{NEW_TOKENS}", f"generate 8 x {PROMPT}+{FEW_TOKENS}"
    return {
        **{name: activated(run) for name, run in passes(model, (1, 16384), (8, 2048)).items()},
        long: activated(generate(model, NEW_TOKENS)),
        f"{long}, registered": both(count=NEW_TOKENS),
        # The cuDNN backend builds a graph for each length that it has not seen.
        f"{short}, new lengths": activated(generate(model, FEW_TOKENS, FEW_TOKENS + 1)),
        f"{short}, new lengths, registered": both(count=FEW_TOKENS, step=FEW_TOKENS + 1),
        # Transformers compiles the steps of a static cache.
        f"{short}, compiled, registered": both(count=FEW_TOKENS, cache_implementation="static"),
    }


def measured(name: str, runs: Runs, rounds: int, version: str) -> Row:
    """Returns the times of a workload with both kinds of attention in turn, each after the other."""
    for _ in range(WARM_UPS):
        with runs.context():
            runs.flashtune()
            flashtune.integrations.wait()
    runs.sdpa()
    sdpa, ours = [], []
    for _ in range(rounds):
        sdpa.append(elapsed(runs.sdpa))
        with runs.context():
            ours.append(elapsed(runs.flashtune))
    return Row(name, tuple(sdpa), tuple(ours), statistics.median(sdpa) / statistics.median(ours), version)


def elapsed(run: Callable[[], None]) -> float:
    """Returns the time of a run, in ms."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
