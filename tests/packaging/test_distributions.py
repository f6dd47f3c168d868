"""Tests of the contents of wheel and source distribution."""

import configparser
import re
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.slow]

ROOMS = ("tuner", "templates", "db")


def _packaged_name(name: str) -> str | None:
    """The path of a checkout's file in the wheel, or None if it is not shipped."""
    room, _, rest = name.partition("/")
    if room in ROOMS:
        return f"flashtune/{name}"
    return name if room == "flashtune" and rest not in ROOMS else None


def _files(wheel: Path) -> set[str]:
    """The wheel's files, its metadata left out."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_wheel_contains_exactly_the_package_files(wheel: Path, checkout_files: tuple[str, ...]) -> None:
    expected = {shipped for name in checkout_files if (shipped := _packaged_name(name))}
    packaged = _files(wheel)
    assert packaged == expected, (
        "a file that is missing here needs an __init__.py beside it or a line in pyproject's package-data"
    )
    assert "flashtune/py.typed" in packaged
    assert "flashtune/templates/forward_q_outer/kernel.py.jinja" in packaged


def test_readme_of_the_wheel_has_only_absolute_links(wheel: Path) -> None:
    metadata = Parser().parsestr(_metadata(wheel, "METADATA"))
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "CLI reference" in text
    assert [address for address in re.findall(r"\]\(([^)]*)\)", text) if "://" not in address] == []


def test_wheel_installs_only_flashtune(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert "flashtune" in top
    assert [name for name in top if name != "flashtune" and not name.endswith(".dist-info")] == []


def test_wheel_from_the_source_distribution_is_equal(
    clean_copy: Path, wheel: Path, build: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    with tarfile.open(build("sdist", clean_copy)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert _files(build("wheel", unpacked)) == _files(wheel)


def test_wheel_has_new_families_and_builds_without_symbolic_links(
    clean_copy: Path, wheel: Path, build: Callable[[str, Path], Path]
) -> None:
    """Unpacked archives often have no links; the folders themselves are packaged."""
    family = clean_copy / "templates" / "zigzag"
    family.mkdir()
    names = ("__init__.py", "family.py", "kernel.py.jinja")
    for name in names:
        (family / name).write_text("")
    for room in ROOMS:
        link = clean_copy / "flashtune" / room
        assert link.is_symlink()
        link.unlink()
        link.write_text(f"../{room}")
    added = {f"flashtune/templates/zigzag/{name}" for name in names}
    assert _files(build("wheel", clean_copy)) == _files(wheel) | added


def test_metadata_lists_requirements(wheel: Path) -> None:
    metadata = Parser().parsestr(_metadata(wheel, "METADATA"))
    needed = metadata.get_all("Requires-Dist") or []
    assert metadata["Name"] == "flashtune"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "torch>=2.10" in needed
    assert "triton<3.10,>=3.6" in needed
    scripts = configparser.ConfigParser()
    scripts.read_string(_metadata(wheel, "entry_points.txt"))
    assert scripts["console_scripts"]["flashtune"] == "flashtune.tuner.cli:main"
    assert "Apache License" in _metadata(wheel, "licenses/LICENSE")
