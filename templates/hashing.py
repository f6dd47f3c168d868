"""The hash of a family's template: records made from another one must be proven again."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

ROOM = "flashtune.templates"
TEMPLATE = "kernel.py.jinja"
# How templates name what they import from or include; always literally.
IMPORT = re.compile(r'{%-? (?:from|include) "([a-z_/.]+)"')


@functools.cache
def template_hash(family_name: str) -> str:
    """Hash of a family's template and of all files that it imports from or includes, 32 hex digits."""
    digest = hashlib.sha256()
    first = f"{family_name}/{TEMPLATE}"
    for name in (first, *sorted(_imported(first) - {first})):
        digest.update(_read(name).encode())
    return digest.hexdigest()[:32]


def _imported(name: str) -> set[str]:
    """A template and all that it imports from or includes, and these in turn."""
    return {name}.union(*(_imported(other) for other in IMPORT.findall(_read(name))))


def _read(name: str) -> str:
    return resources.files(ROOM).joinpath(*name.split("/")).read_text(encoding="utf-8")
