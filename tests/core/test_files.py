"""Tests of the replacement of files."""

import os
from pathlib import Path

import pytest

from flashtune.core.files import replace_file


def test_mode_of_a_replaced_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    before = os.umask(0o027)
    try:
        replace_file(path, b"one")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        replace_file(path, b"two")
    finally:
        os.umask(before)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_replaced_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, path = tmp_path / "victim", tmp_path / "table.json"
    victim.write_bytes(b"kept")
    path.symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    link = tmp_path / ".flashtune-guessed"
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(path, b"new")
    link.unlink()
    replace_file(path, b"new")
    assert (victim.read_bytes(), path.read_bytes(), path.is_symlink()) == (b"kept", b"new", False)


def test_failure_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    (path / "old").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        replace_file(path, b"new")
    assert [*tmp_path.rglob("*")] == [path, path / "old"]
