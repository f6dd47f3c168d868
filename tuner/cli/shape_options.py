"""The options that name shapes and models, and the completion of names in a shell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from flashtune.tuner.workloads.model_sizes import DEFAULT_BATCH, DEFAULT_PAGE_SIZE, DEFAULT_SEQLEN, Phase


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
    "A shape, as key=value pairs: heads=32,kv_heads=8,seqlen=4096,head_dim=128,dtype=bf16,causal,batch=2. "
    "Also seqlen_q, seqlen_kv, value_head_dim, causal=top_left|bottom_right|none, and tokens=16384 in place "
    "of batch. head_dim=64|128 is a list, seqlen=512..16384 every doubling. Further: window=1023 (keys "
    "before a query's own that it sees) or window=1023:0 (before and after), first_tokens=4, chunk=8192, "
    "prefix, softcap, alibi, bias=additive|boolean, sinks, packed=65536 (tokens of all sequences; seqlen is "
    "the longest), lengths, page_size=16, kv_dtype=e4m3|int8, kv_scale=tensor|head|page, latent, dropout. "
    "backward asks for the gradients in place of the output, and deterministic for the same bits in every "
    "run. Repeatable."
)
MODEL_HELP = (
    "The attention of a well-known open model, such as llama-3.1-8b; `flashtune models` lists them. "
    "Repeatable."
)
PHASES = tuple(phase.value for phase in Phase)

PHASE_OPTION = click.option(
    "--phase",
    type=click.Choice(PHASES),
    default=Phase.PREFILL.value,
    show_default=True,
    help="Which phase of a --model or --hf-config: prefill attends from a whole prompt to itself, decode "
    "from one new token of each sequence to all before it. training is prefill and the gradients: of "
    "shapes too it names both passes.",
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
        help="A transformers config.json to take the attention from. Repeatable.",
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
        help="Sequence length for --model and --hf-config, in decode that of the cache; lists and ranges as "
        "in --shape. "
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
    click.option(
        "--page-size",
        metavar="KEYS",
        help="Keys of a page of the cache that decode of --model and --hf-config reads, or a list; 0 for "
        f"contiguous caches. {DEFAULT_PAGE_SIZE} where left out.",
    ),
    click.option(
        "--packed",
        is_flag=True,
        help="Sequences that --model and --hf-config prefill lie packed one behind the other.",
    ),
)
