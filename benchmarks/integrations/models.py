"""Speed of a model with torch's attention and with flashtune, interleaved in one run on a GPU.

    python -m benchmarks.integrations.models --save out/models.json

The model has the shapes of Llama 3.2 1B, but random weights. Its vocabulary has 2,048 tokens, so that the
head takes little time. It runs with transformers' `sdpa` attention. Each round measures with and without
`flashtune.integrations.torch.activate()`, after kernels were prepared. Each figure is the median of the
rounds. It takes about a minute on an NVIDIA H200.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import flashtune.integrations
import flashtune.integrations.torch
from benchmarks.saved import save
from flashtune.integrations.host_library import host_library

# The vocabulary of Llama 3.2 1B has 128,256 tokens.
VOCABULARY = 2048
LAYERS = 16
ROUNDS = 6
PROMPT, NEW_TOKENS, FEW_TOKENS = 2048, 128, 32


class Row(msgspec.Struct, frozen=True):
    """The times of one workload.

    Attributes:
        workload: Its name.
        sdpa_ms: Times with torch's attention, in ms, by round.
        flashtune_ms: Times with flashtune, likewise.
        speedup: Ratio of their medians.
        transformers: Version of transformers.
    """

    workload: str
    sdpa_ms: tuple[float, ...]
    flashtune_ms: tuple[float, ...]
    speedup: float
    transformers: str


def main() -> None:
    """Measures all workloads, prints their times and saves them."""
    parser = argparse.ArgumentParser(description="Speed of a model with and without flashtune.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the times to FILE, in JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    transformers = host_library("transformers", "5.0")
    model = llama(transformers)
    rows = []
    for name, run in workloads(model).items():
        rows.append(measured(name, run, options.rounds, transformers.__version__))
        medians = (statistics.median(times) for times in (rows[-1].sdpa_ms, rows[-1].flashtune_ms))
        sys.stdout.write("{:<36}{:9.2f} ms{:9.2f} ms{:9.3f}\n".format(name, *medians, rows[-1].speedup))
        sys.stdout.flush()
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        save(options.save, rows)


def llama(transformers: Any) -> Any:
    """Returns the model in bf16 on the GPU."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        # Random weights may choose any token, also one that ends the text.
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def workloads(model: Any) -> dict[str, Callable[[], None]]:
    """Returns the functions to measure, by name."""

    def tokens(batch: int, length: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(length)
        return torch.randint(2, VOCABULARY, (batch, length), generator=generator, device="cuda")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def prefill(batch: int, length: int) -> Callable[[], None]:
        ids = tokens(batch, length)

        def run() -> None:
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)

        return run

    def train(batch: int, length: int) -> Callable[[], None]:
        ids = tokens(batch, length)

        def run() -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def generate(count: int, step: int = 0) -> Callable[[], None]:
        """Generates `count` tokens. Each prompt is longer than the last one by `step`."""
        lengths = itertools.count(PROMPT, step)

        def run() -> None:
            ids = tokens(8, next(lengths))
            with torch.no_grad():
                model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

        return run

    return {
        "prefill 1 x 16384": prefill(1, 16384),
        "prefill 8 x 2048": prefill(8, 2048),
        "train 1 x 16384": train(1, 16384),
        "train 8 x 2048": train(8, 2048),
        f"generate 8 x {PROMPT}+{NEW_TOKENS}": generate(NEW_TOKENS),
        # The cuDNN backend builds a graph for each length that it has not seen.
        f"generate 8 x {PROMPT}+{FEW_TOKENS}, new lengths": generate(FEW_TOKENS, FEW_TOKENS + 1),
    }


def measured(name: str, run: Callable[[], None], rounds: int, version: str) -> Row:
    """Returns the times of a workload with both kinds of attention in turn, each after the other."""
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "sdpa": contextlib.nullcontext,
        "flashtune": flashtune.integrations.torch.activate,
    }
    for _ in range(2):
        with flashtune.integrations.torch.activate():
            run()
            flashtune.integrations.wait()
    run()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, context in kinds.items():
            with context():
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                found[kind].append(1e3 * (time.perf_counter() - start))
    sdpa, ours = (tuple(found[kind]) for kind in kinds)
    return Row(name, sdpa, ours, statistics.median(sdpa) / statistics.median(ours), version)


if __name__ == "__main__":
    main()
