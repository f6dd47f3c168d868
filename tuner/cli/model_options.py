"""Options of commands that accept shapes or whole models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.options import (
    NO_SHAPE,
    AnyCommand,
    apply_options,
    gather_models,
    gather_problems,
)
from flashtune.tuner.cli.shape_options import PHASE_OPTION, PHASES, SHAPE_OPTIONS
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.tuner.workloads.models import ModelAttention

# Lengths of a whole model's overview.
LENGTHS = "1024..131072"

PHASE_HELP = (
    "Explain the attention of whole models (--model or --hf-config) over sequence length, not a kernel. "
    "prefill: all tokens of a prompt attend to the prompt. decode: one new token of each sequence attends to "
    f"all earlier ones. training: prefill and its gradients. --seqlen then defaults to {LENGTHS}."
)


class WholeModels(NamedTuple):
    """The requested models, their phase, and their lengths, batch sizes and types."""

    attentions: tuple[ModelAttention, ...]
    sizes: ModelSizes


def shape_or_model_options(command: AnyCommand) -> AnyCommand:
    """Adds the options that name shapes, and --phase.

    The command gets `problems` and `models`: no problems and some models, or problems and None.
    """

    @functools.wraps(command)
    def with_either(
        *args: Any,
        shapes: tuple[str, ...],
        models: tuple[str, ...],
        hf_configs: tuple[Path, ...],
        shapes_files: tuple[Path, ...],
        model_phase: str | None,
        seqlen: str | None,
        batch: str | None,
        dtype: str | None,
        page_size: str | None,
        packed: bool,
        **kwargs: Any,
    ) -> Any:
        problems: tuple[Problem, ...] = ()
        whole: WholeModels | None = None
        if model_phase is None:
            sizes = ModelSizes(Phase.PREFILL, seqlen, batch, dtype, page_size, packed)
            problems = gather_problems(shapes, models, hf_configs, shapes_files, sizes)
            if not problems:
                raise UsageError(NO_SHAPE)
        elif shapes or shapes_files or not (models or hf_configs):
            raise UsageError(
                "--phase explains whole models: name them by --model or --hf-config, and leave shapes out"
            )
        else:
            sizes = ModelSizes(Phase(model_phase), seqlen or LENGTHS, batch, dtype, page_size, packed)
            whole = WholeModels(gather_models(models, hf_configs), sizes)
        return command(*args, problems=problems, models=whole, **kwargs)

    phase = click.option("--phase", "model_phase", type=click.Choice(PHASES), help=PHASE_HELP)
    options = (phase if option is PHASE_OPTION else option for option in SHAPE_OPTIONS)
    return apply_options(tuple(options), with_either)
