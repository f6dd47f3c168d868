"""Generation by transformers through a kernel package in a new process.

Transformers imports the attention functions of one package for the whole process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.support.models.transformers_models import VOCABULARY, model_of

ROOT = Path(__file__).parents[3]
# Continuous batching decodes from pages only if a digit follows "flash" in the name.
PAGED = "org/flashtune-fa2"
NAME = "org/flashtune"
NEW_TOKENS = 8
LENGTHS = (21, 5, 34)


class Settings(NamedTuple):
    """Settings of a process.

    Attributes:
        name: Name of the package in transformers.
        device: Device of the model.
        dtype: Type of the weights, as torch names it.
        head_dim: Head dim of the model.
        page: Keys of a page; 0 generates without continuous batching.
        graphs: Whether continuous batching captures CUDA graphs.
    """

    name: str
    device: str
    dtype: str
    head_dim: int
    page: int
    graphs: bool = False


class Generation(NamedTuple):
    """Results of a process.

    Attributes:
        origins: Files of the functions that transformers calls.
        calls: Names of arguments that transformers passed, for each function that it called.
        lengths: Generated tokens of each prompt.
        slack: The most that the best token's logit exceeds a chosen one's, in standard deviations of logits.
        served: Calls that a kernel computed.
        by_torch: Calls that torch computed.
    """

    origins: list[str]
    calls: dict[str, list[str]]
    lengths: list[int]
    slack: float
    served: int
    by_torch: int


def generation_of(package: Path, settings: Settings) -> Generation:
    """Returns the results of a new process."""
    environment = {**os.environ, "LOCAL_KERNELS": f"{settings.name}={package}", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    if settings.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.models.hub_generation", json.dumps(settings._asdict())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Generation(**json.loads(done.stdout.splitlines()[-1]))


def imported() -> Any:
    """Returns transformers, which takes any version of `kernels` here. It imports `kernels` after this."""
    transformers: Any = importlib.import_module("transformers")
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")

    if not import_utils.is_kernels_available():
        # Transformers 5.23 asks for a newer version than pip finds.
        for module in (import_utils, transformers.utils):
            module.is_kernels_available = lambda *_: True
    return transformers


def record(flash: Any, calls: dict[str, list[str]]) -> list[str]:
    """Returns the files of the functions that transformers calls, and records their arguments."""
    origins = []
    for name in ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        function = getattr(flash, name)
        inner = inspect.unwrap(function)
        origins.append(inspect.getfile(inner))

        def called(*tensors: Any, function: Any = function, inner: Any = inner, **options: Any) -> Any:
            given = inspect.signature(inner).bind(*tensors, **options).arguments
            calls[inner.__name__] = sorted(key for key, value in given.items() if value is not None)
            return function(*tensors, **options)

        setattr(flash, name, called)
    return origins


def slack_of(reference: Any, rows: list[tuple[list[int], list[int]]]) -> float:
    """Returns the slack of generated tokens by a model; see `Generation`."""
    most = 0.0
    for prompt, tokens in rows:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt + tokens])).logits[0].double()
        chosen = logits[len(prompt) - 1 : -1]
        apart = chosen.max(-1).values - chosen.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        most = max(most, float((apart / chosen.std(-1)).max()))
    return most


def decode_from_pages() -> None:
    """Makes continuous batching decode from pages on the CPU, as on a GPU."""
    from transformers.generation.continuous_batching import initialization

    original = initialization.ensure_decode_fast_path_is_available

    def ensured(*args: Any, **options: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            original(*args, **options)

    initialization.ensure_decode_fast_path_is_available = ensured


def main() -> None:
    """Prints a `Generation` as JSON."""
    settings = Settings(**json.loads(sys.argv[1]))
    transformers = imported()
    flash: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    changes: Any = {"head_dim": settings.head_dim}
    dtype = getattr(torch, settings.dtype)
    model = model_of(transformers, "llama", settings.name, settings.device, dtype, **changes)
    found: dict[str, list[str]] = {}
    package = inspect.unwrap(flash._flash_fn).__globals__
    origins = record(flash, found)
    kernels: list[bool] = []
    find = package["find"]

    def recorded(call: Any) -> Any:
        entry = find(call)
        kernels.append(entry is not None)
        return entry

    package["find"] = recorded
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    warnings.filterwarnings("ignore", message="no kernel of this package")
    if settings.page:
        if settings.device == "cpu":
            decode_from_pages()
        config = transformers.ContinuousBatchingConfig
        size = {"page_size", "block_size"} & inspect.signature(config).parameters.keys()  # by version
        batching = config(
            **{size.pop(): settings.page}, num_blocks=64, max_batch_tokens=48, use_cuda_graph=settings.graphs
        )
        results = model.generate_batch(
            prompts,
            generation_config=transformers.GenerationConfig(**options, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=batching,
        )
        made = [result.generated_tokens for result in results.values()]
    else:
        inputs = [torch.tensor([prompt], device=settings.device) for prompt in prompts]
        made = [model.generate(one, **options)[0, one.shape[1] :].tolist() for one in inputs]
    # The weights of the model, which its type may have rounded.
    reference = model_of(transformers, "llama", "sdpa", **changes)
    reference.load_state_dict({key: value.float().cpu() for key, value in model.state_dict().items()})
    rows = list(zip(prompts, made, strict=True))
    slack = slack_of(reference, rows)
    generation = Generation(
        origins, found, [*map(len, made)], slack, sum(kernels), len(kernels) - sum(kernels)
    )
    print(json.dumps(generation._asdict()))  # noqa: T201


if __name__ == "__main__":
    main()
