from pathlib import Path

import pytest

from flashtune.core.errors import StoreError, UsageError
from flashtune.db.location import database_url, describe, sqlite_path, without_password


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


def test_description_omits_password_and_options() -> None:
    url = database_url("postgresql+psycopg://me:secret@host:5432/tuning?password=secret")
    assert sqlite_path(url) is None
    assert describe(url) == "postgresql+psycopg://me:***@host:5432/tuning"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:a#secret@host/db",
        "postgresql://me:a/secret@host/db",
        "postgresql://me:a?secret@host/db",
        "postgresql://me:a@secret@host/db",
        "postgresql://me:secret@ho[st/db",
        "postgresql://me:secret@[::1/db",
        "postgresql://me:x@host:secret/db",
        "postgresql://host/db#password=secret",
        "postgresql://host:1/db?user=me&password=x@secret",
        " postgresql://me:secret@host/db",
        "postgresql:/me:secret@host/db",
        "no such thing://me:secret@host",
        "sqlite://me:secret@host/db",
        "host=host password=secret",
        "postgresql://me:secret@host/a\nb",
    ],
)
def test_ambiguous_urls_are_refused_without_their_text(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        database_url(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_command_lines_are_shown_without_passwords() -> None:
    url = "postgresql://me:secret@host/db"
    assert without_password(f"--db={url}") == "--db=postgresql://me:***@host/db"
    assert without_password(url) == "postgresql://me:***@host/db"
    assert without_password("postgresql://me:a@secret@host/db") == "***"
    assert without_password("--shape=heads=8,seqlen=64") == "--shape=heads=8,seqlen=64"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a" * 300, "too long"),
        ("a/" * 3000, "too long"),
        ("~no-such-user/x", "home folder"),
        ("a\x1b[31mb", "control codes"),
        ("sqlite:///a%00b", "control codes"),
    ],
)
def test_environment_variables_that_name_no_path_are_refused(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", value)
    with pytest.raises(UsageError, match=reason):
        database_url(None)
    monkeypatch.delenv("FLASHTUNE_DB")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", value)
    if "%" not in value:
        with pytest.raises(StoreError, match=reason):
            database_url(None)
