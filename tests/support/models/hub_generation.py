"""Generation by transformers through a kernel package in a new process.

Transformers imports the attention functions of one package for the whole process.
"""

import functools
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
NEW_TOKENS = 8
LENGTHS = (21, 5, 34)


class Settings(NamedTuple):
    """Settings of a process."""

    name: str  # Name of the package in transformers.
    device: str  # Device of the model.
    dtype: str  # Type of the weights, as torch names it.
    head_dim: int  # Head dim of the model.
    page: int  # Keys of a page of continuous batching.
    graphs: bool = False  # Whether continuous batching captures CUDA graphs.
    generates: bool = False  # Whether the model first generates without continuous batching.


class Generation(NamedTuple):
    """Results of a process."""

    origins: list[str]  # Files of the functions that transformers calls.
    # Names of arguments that transformers passed, for each function that it called.
    calls: dict[str, list[str]]
    lengths: list[int]  # Generated tokens of each prompt, in each way.
    # The most that the best token's logit exceeds a chosen one's, in standard deviations of logits.
    slack: float
    served: int  # Calls that a kernel computed.
    by_torch: int  # Calls that torch computed.


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
        timeout=1200,
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


class Recording(NamedTuple):
    """Calls of a package's functions by transformers."""

    origins: list[str]  # Files of the functions.
    calls: dict[str, list[str]]  # Names of passed arguments by function.
    served: list[bool]  # Whether a kernel computed a call, in order.


def record(flash: Any) -> Recording:
    """Records the calls of all functions that transformers loads after this.

    Transformers 5.17 loads them once more for continuous batching.
    """
    recording = Recording([], {}, [])
    load = flash._lazy_imports

    def loaded(*names: Any, **options: Any) -> Any:
        flash_fn, varlen, with_cache, *others = load(*names, **options)
        return *(_recorded(function, recording) for function in (flash_fn, varlen, with_cache)), *others

    flash._lazy_imports = loaded
    return recording


def _recorded(function: Any, recording: Recording) -> Any:
    inner = inspect.unwrap(function)
    recording.origins.append(inspect.getfile(inner))
    package = inner.__globals__
    if not hasattr(package["find"], "__wrapped__"):
        find = package["find"]

        @functools.wraps(find)
        def recorded(call: Any) -> Any:
            entry = find(call)
            recording.served.append(entry is not None)
            return entry

        package["find"] = recorded

    @functools.wraps(function)
    def called(*tensors: Any, **options: Any) -> Any:
        arguments = inspect.signature(inner).bind(*tensors, **options).arguments
        recording.calls[inner.__name__] = sorted(key for key, value in arguments.items() if value is not None)
        return function(*tensors, **options)

    return called


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
    if settings.device == "cpu":
        torch.version.cuda = "13.0"  # as in a build for GPUs, for which packages are
    transformers = imported()
    flash: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    recording = record(flash)
    changes: Any = {"head_dim": settings.head_dim}
    dtype = getattr(torch, settings.dtype)
    model = model_of(transformers, "llama", settings.name, settings.device, dtype, **changes)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    warnings.filterwarnings("ignore", message="no kernel of this package")
    made: list[list[int]] = []
    if settings.generates:
        inputs = [torch.tensor([prompt], device=settings.device) for prompt in prompts]
        made += [model.generate(tensor, **options)[0, tensor.shape[1] :].tolist() for tensor in inputs]
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
    made += [result.generated_tokens for result in results.values()]
    # The weights of the model, which its type may have rounded.
    reference = model_of(transformers, "llama", "sdpa", **changes)
    reference.load_state_dict({key: value.float().cpu() for key, value in model.state_dict().items()})
    rows = list(zip(prompts * (1 + settings.generates), made, strict=True))
    slack = slack_of(reference, rows)
    served = sum(recording.served)
    generation = Generation(
        recording.origins, recording.calls, [*map(len, made)], slack, served, len(recording.served) - served
    )
    print(json.dumps(generation._asdict()))  # noqa: T201


if __name__ == "__main__":
    main()
