"""The options that commands share, as decorators.

- `problem_options` passes `problems: tuple[Problem, ...]`.
- `target_options` passes `target: Target` and `device: int | None`.
- `targets_options` passes `target: Target` and `devices: tuple[int, ...]`, empty to work offline.
- `devices_option` passes `devices: str | None`, which `find_gpus` reads.
- `kernel_options` passes `family: str | None` and `config: str | None`.
- `database_option` passes `db: str | None`.
- `json_option` passes `as_json: bool`.
- `quiet_options` passes nothing: `output.is_set` and `output.shows_progress` return its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from flashtune.core.errors import UsageError, printable
from flashtune.core.machine import TARGET_VARIABLE
from flashtune.tuner.workloads.model_sizes import (
    DEFAULT_BATCH,
    DEFAULT_PAGE_SIZE,
    DEFAULT_SEQLEN,
    ModelSizes,
    Phase,
)
from flashtune.tuner.workloads.shape_keys import EXAMPLES

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.tuner.workloads.models import ModelAttention


AnyCommand = Callable[..., Any]


# Lengths of a whole model's overview.
LENGTHS = "1024..131072"

PHASE_HELP = (
    "Explain the attention of whole models (--model or --hf-config) over sequence length, not a kernel. "
    "prefill: all tokens of a prompt attend to the prompt. decode: one new token of each sequence attends to "
    f"all earlier ones. training: prefill and its gradients. --seqlen then defaults to {LENGTHS}."
)


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    """Returns the GPUs of the table with this prefix, by their short names."""
    from flashtune.core.target import TARGETS

    return _beginning(incomplete, (target.short_name for target in TARGETS))


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    """Returns the known models with this prefix."""
    from flashtune.tuner.workloads.presets import MODELS

    return _beginning(incomplete, (model.name for model in MODELS))


def complete_families(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    """Returns the kernel families with this prefix."""
    from flashtune.templates.registry import family_names

    return _beginning(incomplete, family_names())


def _beginning(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start.lower())]


SHAPE_HELP = (
    f"A shape, such as {' or '.join(EXAMPLES)}. `flashtune shapes` explains the keys, lists and ranges. "
    "Repeatable."
)
MODEL_HELP = (
    "The attention of an open model, such as llama-3.1-8b; `flashtune models` lists them. Repeatable."
)
PHASES = tuple(phase.value for phase in Phase)

PHASE_OPTION = click.option(
    "--phase",
    type=click.Choice(PHASES),
    metavar="PHASE",
    default=Phase.PREFILL.value,
    show_default=True,
    help="Phase of --model or --hf-config. prefill: all tokens of a prompt attend to the prompt. decode: one "
    "new token of each sequence attends to all earlier ones. training: prefill and its gradients, also of "
    "--shape.",
)
SHAPE_OPTIONS = (
    click.option("--shape", "shapes", multiple=True, metavar="SHAPE", help=SHAPE_HELP),
    click.option(
        "--model", "models", multiple=True, metavar="NAME", shell_complete=complete_models, help=MODEL_HELP
    ),
    click.option(
        "--hf-config",
        "hf_configs",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A transformers config.json, whose attention is used. Repeatable.",
    ),
    click.option(
        "--shapes-file",
        "shapes_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A file with one shape per line, as for --shape or in JSON. # starts a comment. Repeatable.",
    ),
    click.option(
        "--score-mod",
        metavar="MODULE:FUNCTION",
        help="A score function of flex_attention, which all shapes get. Its module is imported.",
    ),
    click.option(
        "--mask-mod",
        metavar="MODULE:FUNCTION",
        help="A mask function of flex_attention, which all shapes get. Its module is imported.",
    ),
    PHASE_OPTION,
    click.option(
        "--seqlen",
        metavar="LENGTHS",
        help="Sequence length for --model and --hf-config; with --phase decode, of the cache. Lists and "
        f"ranges as in --shape. Default: {DEFAULT_SEQLEN}.",
    ),
    click.option(
        "--batch",
        metavar="SIZES",
        help="Batch size for --model and --hf-config. Lists and ranges as in --shape. "
        f"Default: {DEFAULT_BATCH}.",
    ),
    click.option(
        "--dtype",
        metavar="DTYPE",
        help="Element type for --model and --hf-config: bf16, fp16, fp32, tf32, e4m3 or a list. Default: the "
        "checkpoint's.",
    ),
    click.option(
        "--page-size",
        metavar="KEYS",
        help="Keys per page of the cache with --phase decode, or a list; 0 for contiguous caches. "
        f"Default: {DEFAULT_PAGE_SIZE}.",
    ),
    click.option(
        "--packed",
        is_flag=True,
        help="Pack the sequences of --model and --hf-config without padding (varlen).",
    ),
)


def problem_options(**others: str) -> Callable[[AnyCommand], AnyCommand]:
    """Adds the options that name shapes. The command gets `problems`, at least one and no duplicates.

    `problems` may be empty if one of `others` is given: options by the names of their parameters, such as
    `recorded_file="--from"`.
    """
    return lambda command: _with_problems(command, others)


def optional_problem_options(command: AnyCommand) -> AnyCommand:
    """As `problem_options`, but `problems` is empty if the user named no shape."""
    return _with_problems(command, None)


def _refuse_no_shape(arguments: Mapping[str, Any], others: Mapping[str, str]) -> NoReturn:
    """Raises an error that names everything that the command line lacks: a shape, and maybe a GPU."""
    *first, last = ("--shape", "--model", "--hf-config", "--shapes-file", *others.values())
    sentence = f"no shape given: use {', '.join(first)} or {last}"
    if "target_name" in arguments:
        try:
            _resolve_target(arguments["target_name"], arguments["device"])
        except UsageError as error:
            sentence += f"; {error}"
    raise UsageError(sentence)


class _Shapes(NamedTuple):
    """The values of `SHAPE_OPTIONS`."""

    shapes: tuple[str, ...]
    models: tuple[str, ...]
    hf_configs: tuple[Path, ...]
    shapes_files: tuple[Path, ...]
    score_mod: str | None
    mask_mod: str | None
    sizes: ModelSizes

    @classmethod
    def take(cls, arguments: dict[str, Any], phase: str) -> _Shapes:
        """Removes the values from a command's arguments, and returns them."""
        sizes = {name: arguments.pop(name) for name in ModelSizes._fields[1:]}
        named = {name: arguments.pop(name) for name in cls._fields[:-1]}
        return cls(**named, sizes=ModelSizes(Phase(phase), **sizes))


def _with_problems(command: AnyCommand, others: Mapping[str, str] | None) -> AnyCommand:
    @functools.wraps(command)
    def with_problems(*args: Any, phase: str, **kwargs: Any) -> Any:
        problems = _gather_problems(_Shapes.take(kwargs, phase))
        if others is not None and not problems and not any(kwargs[name] for name in others):
            _refuse_no_shape(kwargs, others)
        return command(*args, problems=problems, **kwargs)

    return apply_options(SHAPE_OPTIONS, with_problems)


def _gather_problems(named: _Shapes) -> tuple[Problem, ...]:
    """Returns the problems of shape options without duplicates.

    In training, each problem has its gradients too.
    """
    sizes = named.sizes
    if not (any(named[:4]) or sizes.any_size):
        return ()
    from flashtune.tuner.workloads.models import model_problems, training_passes
    from flashtune.tuner.workloads.shapes import parse_shape
    from flashtune.tuner.workloads.shapes_file import read_shapes_file

    problems: list[Problem] = []
    for text in named.shapes:
        problems.extend(parse_shape(text))
    attentions = gather_models(named.models, named.hf_configs)
    if not attentions and sizes.any_size:
        raise UsageError(
            "--phase decode, --seqlen, --batch, --dtype, --page-size and --packed need --model or "
            "--hf-config: give these values in --shape instead"
        )
    for attention in attentions:
        problems.extend(model_problems(attention, sizes))
    for path in named.shapes_files:
        problems.extend(read_shapes_file(path))
    if named.score_mod is not None or named.mask_mod is not None:
        from flashtune.tuner.workloads.functions import with_functions

        problems = list(with_functions(problems, named.score_mod, named.mask_mod))
    return training_passes(problems) if sizes.phase is Phase.TRAINING else tuple(dict.fromkeys(problems))


def gather_models(models: tuple[str, ...], hf_configs: tuple[Path, ...]) -> tuple[ModelAttention, ...]:
    """Returns the named models, and those of config files."""
    from flashtune.tuner.workloads.hf_config import read_hf_config
    from flashtune.tuner.workloads.presets import find_model

    return (*map(find_model, models), *map(read_hf_config, hf_configs))


def target_option(name: str = "target_name", **settings: Any) -> Callable[[AnyCommand], AnyCommand]:
    """Returns an option --target that completes the names of GPUs."""
    return click.option("--target", name, metavar="GPU", shell_complete=complete_targets, **settings)


def family_option(name: str = "family", **settings: Any) -> Callable[[AnyCommand], AnyCommand]:
    """Returns an option --family that completes the names of kernel families."""
    return click.option("--family", name, metavar="NAME", shell_complete=complete_families, **settings)


def file_option(
    flag: str, text: str, name: str | None = None, *, exists: bool = False
) -> Callable[[AnyCommand], AnyCommand]:
    """Returns an option `--flag FILE`. It passes `flag_file` to the command, or the parameter `name`."""
    kind = click.Path(dir_okay=False, exists=exists, path_type=Path)
    return click.option(f"--{flag}", name or f"{flag}_file", type=kind, metavar="FILE", help=text)


DEVICE_OPTION = click.option(
    "--device", type=click.IntRange(min=0), metavar="INDEX", help="GPU of this machine to use. Default: 0."
)
TARGET_OPTIONS = (
    target_option(
        envvar=TARGET_VARIABLE,
        help="GPU to work for, without using it, such as h100; `flashtune targets` lists them. "
        f"Default: {TARGET_VARIABLE}, otherwise the GPU of this machine.",
    ),
    DEVICE_OPTION,
)


def target_options(command: AnyCommand) -> AnyCommand:
    """Adds --target and --device; the command gets `target`, and `device` (None works offline)."""

    @functools.wraps(command)
    def with_target(*args: Any, target_name: str | None, device: int | None, **kwargs: Any) -> Any:
        if device is not None and _from_environment("target_name"):
            target_name = None
        target, index = _resolve_target(target_name, device)
        return command(*args, target=target, device=index, **kwargs)

    return apply_options(TARGET_OPTIONS, with_target)


def targets_options(command: AnyCommand) -> AnyCommand:
    """Adds --target, --device and --devices; the command gets `target` and `devices`, maybe none."""

    @functools.wraps(command)
    def with_targets(
        *args: Any, target_name: str | None, device: int | None, devices: str | None, **kwargs: Any
    ) -> Any:
        if (device is not None or devices is not None) and _from_environment("target_name"):
            target_name = None
        if devices is None:
            target, index = _resolve_target(target_name, device)
            indexes: tuple[int, ...] = () if index is None else (index,)
        elif target_name is not None or device is not None:
            raise UsageError("--target, --device and --devices exclude each other: use one of them")
        else:
            indexes, target = find_gpus(devices)
        return command(*args, target=target, devices=indexes, **kwargs)

    return apply_options((*TARGET_OPTIONS, devices_option()), with_targets)


def devices_option(**settings: Any) -> Callable[[AnyCommand], AnyCommand]:
    """Returns an option --devices."""
    text = "GPUs of this machine to use at once, all or some such as 0,1. They are of one model."
    return click.option("--devices", metavar="all|I,J", help=text, **settings)


def chosen_gpus(device: int | None, devices: str | None) -> tuple[int, ...]:
    """Returns the GPUs of --device and --devices, by default the first."""
    if devices is None:
        return (device or 0,)
    if device is not None:
        raise UsageError("--device and --devices exclude each other: use one of them")
    return find_gpus(devices)[0]


def find_gpus(devices: str) -> tuple[tuple[int, ...], Target]:
    """Returns the GPUs that --devices names, which are of one model, and their target."""
    import torch

    from flashtune.core.target import device_target

    count = torch.cuda.device_count()
    if not count:
        raise UsageError("--devices needs a GPU, and none is visible: run it on a machine with one")
    named = [*map(str, range(count))] if devices == "all" else devices.split(",")
    if not all(name.isdecimal() and int(name) < count for name in named):
        raise UsageError(
            f"--devices is {printable(devices)}: write all, or numbers below {count} such as 0,1"
        )
    indexes = tuple(dict.fromkeys(map(int, named)))
    targets = {target.name: target for target in map(device_target, indexes)}
    if len(targets) > 1:
        raise UsageError(f"the GPUs are {' and '.join(targets)}: name GPUs of one model by --devices")
    return indexes, targets.popitem()[1]


def _from_environment(name: str) -> bool:
    """Returns whether a parameter of the running command comes from an environment variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.ENVIRONMENT


def _resolve_target(name: str | None, device: int | None) -> tuple[Target, int | None]:
    from flashtune.core.target import device_target, find_target

    if name is not None and device is not None:
        raise UsageError("--target and --device exclude each other: use one of them")
    if name is not None:
        return find_target(name), None
    index = device or 0
    return device_target(index), index


def kernel_options(command: AnyCommand) -> AnyCommand:
    """Adds --family and --config. Both are None if the user does not give them."""
    options = (
        family_option(
            help="Kernel family to use instead of the selection's; `flashtune families` lists them."
        ),
        click.option(
            "--config",
            metavar="FIELDS",
            help="Config fields to change, such as block_m=128,block_n=64,num_warps=8. The other fields "
            "are those of the selection, or of the family's default.",
        ),
    )
    return apply_options(options, command)


def target_filter_option(command: AnyCommand) -> AnyCommand:
    """Adds --target as a filter of records. The command gets `target_name`, None for all."""
    return target_option(help="Only records of this GPU, such as h200.")(command)


def database_option(command: AnyCommand) -> AnyCommand:
    """Adds --db; the command gets `db`, None for the default database."""
    return click.option(
        "--db",
        metavar="PATH|URL",
        help="Database: an SQLite file or an SQLAlchemy URL. Default: FLASHTUNE_DB, otherwise a file in "
        "the user's cache folder.",
    )(command)


def jobs_option(command: AnyCommand) -> AnyCommand:
    """Adds --jobs, the number of compiler processes."""
    text = "Compiler processes. Default: one per core, minus one for each GPU."
    return click.option("--jobs", type=click.IntRange(min=1), metavar="N", help=text)(command)


def json_option(command: AnyCommand) -> AnyCommand:
    """Adds --json; the command gets `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(command)


def quiet_options(command: AnyCommand) -> AnyCommand:
    """Adds --quiet, --verbose and --no-progress, which `output` reads from the running command."""
    options = (
        _output_flag("-q", "--quiet", help="Print only the result and errors."),
        _output_flag("-v", "--verbose", help="Also print the outcome of each step, on stderr."),
        _output_flag("--progress/--no-progress", default=True, help="Show progress on stderr. Default: on."),
    )
    return apply_options(options, command)


def _output_flag(*names: str, **settings: Any) -> Callable[[AnyCommand], AnyCommand]:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[f"flashtune.{param.name}"] = value
        if ctx.meta.get("flashtune.quiet") and ctx.meta.get("flashtune.verbose"):
            raise click.UsageError("--quiet and --verbose exclude each other: use one of them")

    return click.option(*names, is_flag=True, expose_value=False, callback=remember, **settings)


def apply_options(options: tuple[Callable[[AnyCommand], AnyCommand], ...], command: AnyCommand) -> AnyCommand:
    """Adds options to a command, in the order in which its help lists them."""
    for option in reversed(options):
        command = option(command)
    return command


class WholeModels(NamedTuple):
    """The requested models, their phase, and their lengths, batch sizes and types."""

    attentions: tuple[ModelAttention, ...]
    sizes: ModelSizes


def shape_or_model_options(command: AnyCommand) -> AnyCommand:
    """Adds the options that name shapes, and --phase.

    The command gets `problems` and `models`: no problems and some models, or problems and None.
    """

    @functools.wraps(command)
    def with_either(*args: Any, model_phase: str | None, **kwargs: Any) -> Any:
        named = _Shapes.take(kwargs, model_phase or Phase.PREFILL)
        problems: tuple[Problem, ...] = ()
        whole: WholeModels | None = None
        if model_phase is None:
            problems = _gather_problems(named)
            if not problems:
                _refuse_no_shape(kwargs, {})
        elif named.shapes or named.shapes_files or not (named.models or named.hf_configs):
            raise UsageError(
                "--phase explains whole models: name them by --model or --hf-config, and leave shapes out"
            )
        else:
            sizes = named.sizes._replace(seqlen=named.sizes.seqlen or LENGTHS)
            whole = WholeModels(gather_models(named.models, named.hf_configs), sizes)
        return command(*args, problems=problems, models=whole, **kwargs)

    phase = click.option(
        "--phase", "model_phase", type=click.Choice(PHASES), metavar="PHASE", help=PHASE_HELP
    )
    options = (phase if option is PHASE_OPTION else option for option in SHAPE_OPTIONS)
    return apply_options(tuple(options), with_either)


def model_options(command: AnyCommand) -> AnyCommand:
    """Adds the options that name models in training and their sizes; the command gets `models`."""

    @functools.wraps(command)
    def with_models(*args: Any, models: tuple[str, ...], hf_configs: tuple[Path, ...], **kwargs: Any) -> Any:
        seqlen, batch, dtype = (kwargs.pop(name) for name in ("seqlen", "batch", "dtype"))
        if not (models or hf_configs):
            raise UsageError("no model given: use --model or --hf-config")
        sizes = ModelSizes(Phase.TRAINING, seqlen or LENGTHS, batch, dtype)
        return command(*args, models=WholeModels(gather_models(models, hf_configs), sizes), **kwargs)

    sizes = SHAPE_OPTIONS.index(PHASE_OPTION) + 1
    return apply_options((*SHAPE_OPTIONS[1:3], *SHAPE_OPTIONS[sizes : sizes + 3]), with_models)
