"""Fakes in place of a module's functions."""

from types import ModuleType

import pytest


def install(monkeypatch: pytest.MonkeyPatch, fake: object, module: ModuleType) -> None:
    """Replaces functions of a module by the methods of these names of a fake, which has no other methods."""
    for name, method in vars(type(fake)).items():
        if callable(method) and not name.startswith("__"):
            monkeypatch.setattr(module, name, getattr(fake, name))
