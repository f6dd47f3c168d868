"""The options that commands share, as decorators.

`problem_options` gives `problems: tuple[Problem, ...]`, `target_options` gives `target: Target` and
`device: int | None`, `kernel_options` gives `family: str | None` and `config: str | None`,
`database_option` gives `db: str | None`, `json_option` gives `as_json: bool`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.errors import UsageError

if TYPE_CHECKING:
    from flashtune.problem import Problem
    from flashtune.target import Target

AnyCommand = Callable[..., Any]

SHAPE_HELP = (
    "A shape, as key=value pairs: heads=32,kv_heads=8,seqlen=4096,head_dim=128,dtype=bf16,causal,batch=2. "
    "Also seqlen_q, seqlen_kv, value_head_dim, causal=top_left|bottom_right|none, and tokens=16384 in place "
    "of batch. head_dim=64|128 is a list, seqlen=512..16384 every doubling. Further: window=1023 (keys before a "
    "query's own that it sees) or window=1023:0 (before and after), first_tokens=4, chunk=8192, prefix, "
    "softcap, alibi, bias=additive|boolean, sinks, packed=65536 (tokens of all sequences; seqlen is the "
    "longest), lengths, page_size=16, kv_dtype=e4m3|int8, kv_scale=tensor|head|page, latent. Repeatable."
)
MODEL_HELP = "The attention shape of a well-known open model, such as llama-3.1-8b. Repeatable."

DEFAULT_SEQLEN = "4096"
DEFAULT_BATCH = "1"

PHASE_OPTION = click.option(
    "--phase",
    type=click.Choice(["prefill"]),
    default="prefill",
    show_default=True,
    help="Which phase of a --model or --hf-config: prefill attends from a whole prompt to itself.",
)
SHAPE_OPTIONS = (
    click.option("--shape", "shapes", multiple=True, metavar="SHAPE", help=SHAPE_HELP),
    click.option("--model", "models", multiple=True, metavar="NAME", help=MODEL_HELP),
    click.option(
        "--hf-config",
        "hf_configs",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A transformers config.json to take the attention shape from. Repeatable.",
    ),
    click.option(
        "--shapes-file",
        "shapes_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A file of shapes: one a line, as for --shape or in JSON; # starts a comment. Repeatable.",
    ),
    PHASE_OPTION,
    click.option(
        "--seqlen",
        metavar="LENGTHS",
        help="Sequence length for --model and --hf-config; lists and ranges as in --shape. "
        f"{DEFAULT_SEQLEN} where left out.",
    ),
    click.option(
        "--batch",
        metavar="SIZES",
        help="Batch size for --model and --hf-config; lists and ranges as in --shape. "
        f"{DEFAULT_BATCH} where left out.",
    ),
    click.option(
        "--dtype",
        metavar="DTYPE",
        help="bf16, fp16, fp32, e4m3 or a list, for --model and --hf-config, in place of the checkpoint's "
        "own.",
    ),
)


def problem_options(command: AnyCommand) -> AnyCommand:
    """Adds the ways to name shapes; the command gets `problems`, at least one and none twice."""
    return _with_problems(command, required=True)


def optional_problem_options(command: AnyCommand) -> AnyCommand:
    """As `problem_options`; `problems` is empty where the user named no shape."""
    return _with_problems(command, required=False)


def _with_problems(command: AnyCommand, *, required: bool) -> AnyCommand:
    @functools.wraps(command)
    def with_problems(
        *args: Any,
        shapes: tuple[str, ...],
        models: tuple[str, ...],
        hf_configs: tuple[Path, ...],
        shapes_files: tuple[Path, ...],
        phase: str,
        seqlen: str | None,
        batch: str | None,
        dtype: str | None,
        **kwargs: Any,
    ) -> Any:
        del phase  # only prefill exists so far, and click has checked it
        problems = gather_problems(shapes, models, hf_configs, shapes_files, (seqlen, batch, dtype))
        if required and not problems:
            raise UsageError("name a shape, by --shape, --model, --hf-config or --shapes-file")
        return command(*args, problems=problems, **kwargs)

    return apply_options(SHAPE_OPTIONS, with_problems)


def gather_problems(
    shapes: tuple[str, ...],
    models: tuple[str, ...],
    hf_configs: tuple[Path, ...],
    shapes_files: tuple[Path, ...],
    sizes: tuple[str | None, str | None, str | None],
) -> tuple[Problem, ...]:
    """The problems that shape options name, none twice; `sizes` are --seqlen, --batch and --dtype.

    Raises:
        UsageError: One of them names nothing, or something impossible.
    """
    from flashtune.tuner.hf_config import read_hf_config
    from flashtune.tuner.models import find_model, prefill
    from flashtune.tuner.shapes import parse_shape
    from flashtune.tuner.shapes_file import read_shapes_file

    seqlen, batch, dtype = sizes
    found: list[Problem] = []
    for text in shapes:
        found.extend(parse_shape(text))
    attentions = [*map(find_model, models), *map(read_hf_config, hf_configs)]
    if not attentions and any(size is not None for size in sizes):
        raise UsageError(
            "--seqlen, --batch and --dtype go with --model or --hf-config: write them into the --shape"
        )
    for attention in attentions:
        lengths, batches = seqlen or DEFAULT_SEQLEN, batch or DEFAULT_BATCH
        found.extend(prefill(attention, seqlen=lengths, batch=batches, dtype=dtype))
    for path in shapes_files:
        found.extend(read_shapes_file(path))
    return tuple(dict.fromkeys(found))


def target_options(command: AnyCommand) -> AnyCommand:
    """Adds --target and --device; the command gets `target`, and `device` (None works offline)."""

    @functools.wraps(command)
    def with_target(*args: Any, target_name: str | None, device: int | None, **kwargs: Any) -> Any:
        target, index = _resolve_target(target_name, device)
        return command(*args, target=target, device=index, **kwargs)

    options = (
        click.option(
            "--target",
            "target_name",
            metavar="GPU",
            help="Work for this GPU without having it: a100, l4, l40s, h100, h200, b200, rtx-4090, rtx-5090 "
            "or mi300x. The GPU of this machine where left out.",
        ),
        click.option(
            "--device",
            type=click.IntRange(min=0),
            metavar="INDEX",
            help="Which GPU of this machine to use. The first where left out.",
        ),
    )
    return apply_options(options, with_target)


def _resolve_target(name: str | None, device: int | None) -> tuple[Target, int | None]:
    from flashtune.target import device_target, find_target

    if name is not None and device is not None:
        raise UsageError("--target works without a GPU, --device is one of this machine: give one of the two")
    if name is not None:
        return find_target(name), None
    index = device or 0
    return device_target(index), index


def kernel_options(command: AnyCommand) -> AnyCommand:
    """Adds --family and --config, both None where the user leaves the choice to flashtune."""
    options = (
        click.option("--family", metavar="NAME", help="A kernel family, in place of the selection's."),
        click.option(
            "--config",
            metavar="FIELDS",
            help="Fields of the config to change, such as block_m=128,block_n=64,num_warps=8; the others "
            "stay as in the selection, or in the family's default.",
        ),
    )
    return apply_options(options, command)


def target_filter_option(command: AnyCommand) -> AnyCommand:
    """Adds --target as a filter of what is stored; the command gets `target_name`, None for all."""
    return click.option(
        "--target", "target_name", metavar="GPU", help="Only what is stored for this GPU, such as h200."
    )(command)


def database_option(command: AnyCommand) -> AnyCommand:
    """Adds --db; the command gets `db`, None for the default database."""
    return click.option(
        "--db",
        metavar="PATH|URL",
        help="The database: an SQLite file or an SQLAlchemy URL. FLASHTUNE_DB, or a file in the user's cache "
        "folder, where left out.",
    )(command)


def json_option(command: AnyCommand) -> AnyCommand:
    """Adds --json; the command gets `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")(command)


def apply_options(options: tuple[Callable[[AnyCommand], AnyCommand], ...], command: AnyCommand) -> AnyCommand:
    """Adds options to a command, in the order in which its help lists them."""
    for option in reversed(options):
        command = option(command)
    return command
