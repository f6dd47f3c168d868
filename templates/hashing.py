"""The hash of a family's template: records made from another one must be proven again."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

ROOM = "flashtune.templates"
TEMPLATE = "kernel.py.jinja"
SHARED = "common"


@functools.cache
def template_hash(family_name: str) -> str:
    """Hash of a family's template and of the macros that it may use, 32 hex digits."""
    digest = hashlib.sha256()
    room = resources.files(ROOM)
    shared = sorted(
        (entry for entry in room.joinpath(SHARED).iterdir() if entry.name.endswith(".jinja")),
        key=lambda entry: entry.name,
    )
    for entry in (room.joinpath(family_name, TEMPLATE), *shared):
        digest.update(entry.read_bytes())
    return digest.hexdigest()[:32]
