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
    "The attention of an open model, such as llama-3.1-8b; `flashtune models` lists them. Repeatable."
)
PHASES = tuple(phase.value for phase in Phase)

PHASE_OPTION = click.option(
    "--phase",
    type=click.Choice(PHASES),
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
        help="Element type for --model and --hf-config: bf16, fp16, fp32, e4m3 or a list. Default: the "
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
