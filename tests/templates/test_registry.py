"""Tests of the names of families, and of limits of open files."""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

import flashtune.templates
from flashtune.core.errors import MachineError
from flashtune.dispatch import versions
from flashtune.templates import registry
from flashtune.templates.registry import TEMPLATE, family_names


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Open files stay open, and no file can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_folders_with_a_template_are_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Programs without sources have compiled modules.
    folder = tmp_path / "templates"
    shutil.copytree(next(iter(flashtune.templates.__path__)), folder, ignore=lambda *_: ["family.py"])
    monkeypatch.setattr(resources, "files", lambda _: folder)
    names = family_names.__wrapped__()
    assert {"forward_q_outer", "backward_hopper"} < set(names)
    assert "common" not in names
    assert all((folder / name / TEMPLATE).is_file() for name in names)


def test_a_folder_that_cannot_be_listed_is_an_error() -> None:
    with no_more_files(), pytest.raises(MachineError, match="too many files are open"):
        registry.family_names.__wrapped__()


def test_a_version_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(versions, "NVIDIA_DRIVER", version)
    assert versions.driver_version() == "none"
    version.write_text("580.159.04\n")
    assert versions.driver_version() == "580.159.04"
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        versions.driver_version()
    versions.current_versions("forward_q_outer")
    with no_more_files(), pytest.raises(MachineError, match="too many files are open"):
        versions.current_versions("forward_q_outer")
