"""Shell completion of targets, models and kernel families."""

from __future__ import annotations

from collections.abc import Iterable

import click


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
