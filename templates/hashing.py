"""The version of a family's template. Records of another version must be verified again."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

from flashtune.core.kernel import canonical_template

ROOM = "flashtune.templates"
TEMPLATE = "kernel.py.jinja"
# Templates contain the names of imported or included files literally.
IMPORT = re.compile(r'{%-? (?:from|import|include) "([\w/.-]+)"')


@functools.cache
def template_hash(family_name: str) -> str:
    """Returns the hash of a family's template and of all files that it imports or includes, 32 hex digits.

    Comments and docstrings do not count. jinja2 is not imported, because a tuned call does not need it.
    """
    digest = hashlib.sha256()
    first = f"{family_name}/{TEMPLATE}"
    for name in (first, *sorted(_imported(first) - {first})):
        digest.update(canonical_template(_read(name)).encode() + b"\0")
    return digest.hexdigest()[:32]


def _imported(name: str) -> set[str]:
    """Returns a template and all files that it imports or includes, directly or indirectly."""
    return {name}.union(*(_imported(other) for other in IMPORT.findall(_read(name))))


def _read(name: str) -> str:
    return resources.files(ROOM).joinpath(*name.split("/")).read_text(encoding="utf-8")
