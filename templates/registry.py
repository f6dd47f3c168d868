"""Finds families by name: every folder here with a `family.py` is one."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import flashtune.templates as room
from flashtune.core.errors import TableError
from flashtune.templates.family import Family

SHARED = "common"


@functools.cache
def family_names() -> tuple[str, ...]:
    """Returns the names of all families, without importing them."""
    folders = (module.name for module in pkgutil.iter_modules(room.__path__) if module.ispkg)
    return tuple(sorted(name for name in folders if name != SHARED))


@functools.cache
def find_family(name: str) -> Family:
    """Returns the family of a name from a table, a database or a user.

    Raises:
        TableError: No family has this name.
    """
    if name not in family_names():
        raise TableError(
            f"there is no kernel family {name!r}: this flashtune knows {', '.join(family_names())}"
        )
    family: Family = importlib.import_module(f"flashtune.templates.{name}.family").FAMILY
    return family


def families() -> tuple[Family, ...]:
    """Returns all families."""
    return tuple(find_family(name) for name in family_names())
