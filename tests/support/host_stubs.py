"""Modules of serving libraries that are not installed, with the classes that frozen contracts describe."""

import abc
import ast
import enum
import json
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

CONTRACTS = Path(__file__).parents[1] / "data/contracts"
ENUMS: dict[str, Any] = {"Enum": enum.Enum, "IntEnum": enum.IntEnum}
METHODS = ("(", "staticmethod (", "classmethod (")
# Modules of flashtune that import a library, and so must be imported anew.
OURS = ("flashtune.integrations.vllm_backend", "flashtune.integrations.sglang_backend")


def contract(library: str) -> dict[str, Any]:
    """The frozen contract of a library."""
    frozen: dict[str, Any] = json.loads((CONTRACTS / f"{library}.json").read_text(encoding="utf-8"))
    return frozen


def install(library: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts stubs of a library's modules in place until the test ends, and returns them by name."""
    frozen = contract(library)
    made: dict[str, types.ModuleType] = {}
    for name, parts in frozen["modules"].items():
        module = _module(name, made)
        classes: dict[str, Any] = {}
        # A class comes after its bases.
        for each in sorted(
            parts, key=lambda each: len(parts[each]["bases"]) if _is_class(parts[each]) else 0
        ):
            if _is_class(parts[each]):
                classes[each] = _class(each, parts[each], classes)
                setattr(module, each, classes[each])
    for name, module in made.items():
        patch.setitem(sys.modules, name, module)
    for ours in OURS:
        patch.delitem(sys.modules, ours, raising=False)
    report_version(patch, library, frozen["version"])
    return made


def report_version(patch: pytest.MonkeyPatch, library: str, version: str | None) -> None:
    """Lets a library seem to be installed in a version, or not to be installed."""
    others = metadata.version

    def reported(name: str) -> str:
        if name == library and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == library and version else others(name)

    patch.setattr(metadata, "version", reported)


def _module(name: str, made: dict[str, types.ModuleType]) -> types.ModuleType:
    """Returns a new module, after the packages around it."""
    if name not in made:
        package, _, last = name.rpartition(".")
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        if package:
            setattr(_module(package, made), last, made[name])
    return made[name]


def _is_class(part: object) -> bool:
    return isinstance(part, dict)


def _class(name: str, part: dict[str, Any], classes: dict[str, Any]) -> Any:
    texts = {key: text for key, text in part.items() if isinstance(text, str)}
    for base, kind in ENUMS.items():
        if base in part["bases"]:
            values = {key: ast.literal_eval(text[2:]) for key, text in texts.items() if text.startswith("= ")}
            return kind(name, values, **({"type": str} if "str" in part["bases"] else {}))
    abstract = part.get("abstract methods", ())
    names = {*abstract, *(key for key, text in texts.items() if text.startswith(METHODS))}
    members = {key: _method(texts.get(key, ""), key in abstract) for key in names}
    # Generic classes are subscripted where they are extended.
    members["__class_getitem__"] = classmethod(lambda cls, _: cls)
    bases = tuple(classes[base] for base in part["bases"] if base in classes)
    return abc.ABCMeta(name, bases or (object,), members)


def _method(text: str, is_abstract: bool) -> Any:
    def method(*_: object, **__: object) -> None:
        """Does nothing."""

    made = abc.abstractmethod(method) if is_abstract else method
    if text.startswith("staticmethod"):
        return staticmethod(made)
    return classmethod(made) if text.startswith("classmethod") else made
