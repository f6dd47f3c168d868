from __future__ import annotations

from pathlib import Path

import pytest

from flashtune.core.errors import UsageError
from flashtune.db.location import database_url, describe, sqlite_path


def test_default_database_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHTUNE_DB")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path))
    assert sqlite_path(database_url(None)) == tmp_path / "flashtune.sqlite"


@pytest.mark.parametrize("value", ["{}/other.sqlite", "sqlite:///{}/other.sqlite"])
def test_environment_variable_accepts_path_or_url(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", value.format(tmp_path))
    assert sqlite_path(database_url(None)) == tmp_path / "other.sqlite"


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_path(database_url("a.sqlite")) == tmp_path / "a.sqlite"
    assert sqlite_path(database_url("sqlite:///a.sqlite")) == tmp_path / "a.sqlite"


@pytest.mark.parametrize("name", ["a?b.sqlite", "50%41.sqlite", "a b#c.sqlite", "größe.sqlite"])
def test_unusual_file_names_round_trip_through_url(name: str, tmp_path: Path) -> None:
    url = database_url(str(tmp_path / name))
    assert sqlite_path(url) == tmp_path / name
    assert sqlite_path(database_url(url)) == tmp_path / name


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///a?mode=ro", "sqlite+x:///a"]
)
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no file"):
        database_url(url)


def test_description_omits_password() -> None:
    url = database_url("postgresql+psycopg://me:secret@host:5432/tuning?sslmode=require")
    assert sqlite_path(url) is None
    assert describe(url) == "postgresql+psycopg://me@host:5432/tuning"
