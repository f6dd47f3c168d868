"""Configs as text: `block_m=128,num_warps=8` changes those fields of a base config."""

from __future__ import annotations

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import UsageError
from flashtune.tuner.workloads.shape_values import nearest, quoted


def change_config(base: Config, text: str) -> Config:
    """Returns the base config with the fields that a user named changed.

    Raises:
        UsageError: An unknown field, or a value that the field cannot have.
    """
    changes: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if name not in base.__struct_fields__:
            raise UsageError(f"a config has no {quoted(name)}: {nearest(name, base.__struct_fields__)}")
        if name in changes:
            raise UsageError(f"{name} is given twice in the config: keep one")
        changes[name] = value if separator else "true"
    raw = {name: msgspec.to_builtins(value) for name, value in base.items()} | changes
    try:
        # Not strict: digits become numbers, `true` and `false` become bools, words become enums.
        return msgspec.convert(raw, type(base), strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the config {quoted(text)} cannot be used: {error}") from error
