"""Imports of the libraries that use flashtune, with one error for all versions that do not fit."""

import functools
import importlib
import re
from types import ModuleType
from typing import Any

from flashtune.core.errors import UsageError
from flashtune.core.machine import installed_version


def host_library(
    module: str, least: str, below: str | None = None, distribution: str | None = None
) -> ModuleType:
    """Returns the module of another library, imported now.

    Args:
        module: Name of the module, such as `transformers`.
        least: The oldest version that works, such as `5.17`.
        below: The first version that does not work any more. None if there is none.
        distribution: Name of the package, if it is not that of the module.
    """
    package = distribution or module.partition(".")[0]
    needed = f"{package} >= {least}" + ("" if below is None else f", < {below}")
    try:
        version = installed_version(package)
    except ImportError:
        raise UsageError(f"{package} is not installed: install {needed}") from None
    if _numbers(version) < _numbers(least) or (below is not None and _numbers(version) >= _numbers(below)):
        age = "old" if _numbers(version) < _numbers(least) else "new"
        raise UsageError(f"{package} {version} is too {age}: install {needed}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The package is there, and its oldest version that works has this module. Errors of other kinds, such
        # as a missing name, come from a module that is there.
        missing = isinstance(error, ModuleNotFoundError) and "." in (error.name or "")
        if missing and f"{module}.".startswith(f"{error.name}."):
            raise _too_new(package, version, error.name, least) from error
        raise UsageError(f"{module} cannot be imported ({error}): install {needed}") from error


def host_attribute(module: str, name: str, least: str, below: str | None = None) -> Any:
    """Returns a class, function or constant of another library, and imports its module now.

    Args:
        module: Name of the module. Its first part names the package.
        name: Name in the module.
        least: The oldest version that works.
        below: The first version that does not work any more. None if there is none.
    """
    library = host_library(module, least, below)
    try:
        return getattr(library, name)
    except AttributeError as error:
        package = module.partition(".")[0]
        raise _too_new(package, installed_version(package), f"{module}.{name}", least) from error


@functools.cache
def host_subclass(name: str, own: type, module: str, base_name: str, least: str) -> Any:
    """Returns a class with the methods of `own` that extends a class of another library, made once.

    `module`, `base_name` and `least` are the arguments of `host_attribute`.
    """
    base = host_attribute(module, base_name, least)
    return type(base)(name, (own, base), {"__module__": own.__module__})


def _too_new(package: str, version: str, missing: str | None, least: str) -> UsageError:
    """Returns the error about a name that was there in the oldest version that works."""
    return UsageError(f"{package} {version} has no {missing}: install {package} {least} or a newer flashtune")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version before any letter: `2.13.0+cpu` and `2.13.0rc1` have 2, 13 and 0."""
    start = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in start[0].split(".")) if start else ()
