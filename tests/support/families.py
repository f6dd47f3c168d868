"""Fixtures that replace what ships: `native` a Gluon family of one GPU, `ship` the tuned tables."""

import shutil
import types
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

import flashtune.templates as room
from flashtune.db import table
from flashtune.db.table import TunedTable, dump_table
from flashtune.dispatch import lookup
from flashtune.templates import registry, rendering
from flashtune.templates.family import Family
from flashtune.tuner.tables.lookup import shipped_by_problem

FOLDER = Path(__file__).parents[1] / "data" / "families"
NAME = "forward_native"
SHIPPED = "forward_hopper"


class Folders:
    """Several folders as one, as `importlib.resources` shows a package's."""

    def __init__(self, *folders: str) -> None:
        self._folders = [Path(folder) for folder in folders]

    def joinpath(self, *parts: str) -> Path:
        paths = [folder.joinpath(*parts) for folder in self._folders]
        return next((path for path in paths if path.exists()), paths[0])

    def iterdir(self) -> Iterator[Path]:
        paths = (path for folder in self._folders for path in folder.iterdir())
        return (path for path in paths if path.name != SHIPPED)


Ship = Callable[..., None]


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ship]:
    """A function that replaces the shipped tables."""
    folder = tmp_path / "shipped"

    def ship(*tables: TunedTable) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for replacement in tables:
            (folder / f"{replacement.target}.json").write_bytes(dump_table(replacement))
        monkeypatch.setattr(table, "FOLDER", str(folder))
        forget()

    def forget() -> None:
        table.shipped_table.cache_clear()
        shipped_by_problem.cache_clear()

    yield ship
    forget()


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, ship: Ship) -> Iterator[Family]:
    """The family `forward_native`: only sm_90, only 16-byte alignment, not interpreted."""
    both = Folders(*room.__path__, str(FOLDER))
    everywhere = types.SimpleNamespace(files=lambda name: both)
    for module in (registry, rendering):
        assert module.resources is resources
        monkeypatch.setattr(module, "resources", everywhere)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(FOLDER)])
    monkeypatch.setattr(lookup, "DEFAULT_FAMILIES", (NAME, *lookup.DEFAULT_FAMILIES))
    # The shipped tables name the family whose place is taken.
    ship()
    registry.family_names.cache_clear()
    yield registry.find_family(NAME)
    monkeypatch.undo()
    registry.family_names.cache_clear()
    registry.find_family.cache_clear()
