"""The options of a command that takes shapes, or whole models and what they do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flashtune.errors import UsageError
from flashtune.tuner.cli.options import (
    DEFAULT_BATCH,
    PHASE_OPTION,
    SHAPE_OPTIONS,
    AnyCommand,
    apply_options,
    gather_problems,
)

if TYPE_CHECKING:
    from flashtune.problem import Problem
    from flashtune.tuner.models import ModelAttention

# Lengths of a whole model's overview.
LENGTHS = "1024..131072"
PHASES = ("prefill", "decode")

PHASE_HELP = (
    "Explain the attention of whole models, named by --model or --hf-config, over sequence length, in place "
    "of kernels: prefill attends from a whole prompt to itself, decode from one new token of each sequence. "
    f"--seqlen is {LENGTHS} then, where left out."
)


class WholeModel(NamedTuple):
    """A model, and its prefill at each length, batch size and type that was asked for."""

    attention: ModelAttention
    problems: tuple[Problem, ...]


def shape_or_model_options(command: AnyCommand) -> AnyCommand:
    """Adds the ways to name shapes, and --phase.

    The command gets `problems` and `models`, one of the two empty, and `model_phase`, None with problems.
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
        **kwargs: Any,
    ) -> Any:
        problems: tuple[Problem, ...] = ()
        whole: tuple[WholeModel, ...] = ()
        if model_phase is None:
            problems = gather_problems(shapes, models, hf_configs, shapes_files, (seqlen, batch, dtype))
            if not problems:
                raise UsageError("name a shape, by --shape, --model, --hf-config or --shapes-file")
        elif shapes or shapes_files or not (models or hf_configs):
            raise UsageError(
                "--phase explains whole models: name them by --model or --hf-config, and leave shapes out"
            )
        else:
            whole = _whole_models(models, hf_configs, seqlen, batch, dtype)
        return command(*args, problems=problems, models=whole, model_phase=model_phase, **kwargs)

    phase = click.option("--phase", "model_phase", type=click.Choice(PHASES), help=PHASE_HELP)
    options = (phase if option is PHASE_OPTION else option for option in SHAPE_OPTIONS)
    return apply_options(tuple(options), with_either)


def _whole_models(
    models: tuple[str, ...],
    hf_configs: tuple[Path, ...],
    seqlen: str | None,
    batch: str | None,
    dtype: str | None,
) -> tuple[WholeModel, ...]:
    from flashtune.tuner.hf_config import read_hf_config
    from flashtune.tuner.models import find_model, prefill

    attentions = (*map(find_model, models), *map(read_hf_config, hf_configs))
    return tuple(
        WholeModel(
            attention,
            prefill(attention, seqlen=seqlen or LENGTHS, batch=batch or DEFAULT_BATCH, dtype=dtype),
        )
        for attention in attentions
    )
