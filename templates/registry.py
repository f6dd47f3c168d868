"""Finds families by name, and the versions of their templates.

Every folder here with a `kernel.py.jinja` is a family. Records of another version must be verified again.
"""

import functools
import hashlib
import importlib
import re
from importlib import resources

from flashtune.core.canonical_source import canonical_template
from flashtune.core.errors import TableError, nearest, quoted
from flashtune.core.machine import machine_errors
from flashtune.templates.family import Family

PACKAGE = "flashtune.templates"
TEMPLATE = "kernel.py.jinja"
# Templates contain the names of imported or included files literally.
IMPORT = re.compile(r'{%-? (?:from|import|include) "([\w/.-]+)"')


@functools.cache
def family_names() -> tuple[str, ...]:
    """Returns the names of all families, without importing them.

    Raises:
        MachineError: The folder cannot be listed.
    """
    # pkgutil.iter_modules returns nothing if the folder cannot be listed.
    with machine_errors():
        folders = [path for path in resources.files(PACKAGE).iterdir() if not path.name.startswith("_")]
        return tuple(sorted(folder.name for folder in folders if folder.joinpath(TEMPLATE).is_file()))


@functools.cache
def find_family(name: str) -> Family:
    """Returns the family of a name from a table, a database or a user."""
    if name not in family_names():
        raise TableError(f"there is no kernel family {quoted(name)}: {nearest(name, family_names())}")
    family: Family = importlib.import_module(f"flashtune.templates.{name}.family").FAMILY
    return family


def families() -> tuple[Family, ...]:
    """Returns all families."""
    return tuple(find_family(name) for name in family_names())


@functools.cache
def template_hash(family_name: str) -> str:
    """Returns the hash of a family's template and of all files that it imports or includes, 32 hex digits.

    Comments and docstrings do not count. jinja2 is not imported, because a tuned call does not need it.
    """
    digest = hashlib.sha256()
    first = f"{family_name}/{TEMPLATE}"
    texts = _imported(first)
    for name in (first, *sorted(texts.keys() - {first})):
        digest.update(_canonical(texts[name]).encode() + b"\0")
    return digest.hexdigest()[:32]


# Families share files. The limit is above the number of files.
_canonical = functools.lru_cache(maxsize=256)(canonical_template)


def _imported(name: str) -> dict[str, str]:
    """Returns the texts of a template and of all files that it imports or includes, at any depth."""
    texts: dict[str, str] = {}
    names = [name]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = _read(name)
            names += IMPORT.findall(texts[name])
    return texts


def _read(name: str) -> str:
    return resources.files(PACKAGE).joinpath(*name.split("/")).read_text(encoding="utf-8")
