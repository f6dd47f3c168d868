"""Distributions of a release, built from clean copies of the checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[2]

Build = Callable[[Literal["wheel", "sdist"], Path], Path]


@pytest.fixture(scope="session")
def checkout_files() -> tuple[str, ...]:
    """Paths of the files that git tracks or would track, with links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(name for name in listing.split("\0") if name and os.path.lexists(ROOT / name))


@pytest.fixture
def clean_copy(checkout_files: tuple[str, ...], tmp_path: Path) -> Path:
    """A tree of only these files, like a new clone."""
    return _copy(checkout_files, tmp_path / "source")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a distribution of a source tree, with the installed setuptools."""

    def build(kind: Literal["wheel", "sdist"], source: Path) -> Path:
        out = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir"]
        result = subprocess.run(
            [*command, str(out), str(source)], capture_output=True, text=True, timeout=1200
        )
        assert result.returncode == 0, result.stdout + result.stderr
        (distribution,) = out.iterdir()
        return distribution

    return build


@pytest.fixture(scope="session")
def wheel(checkout_files: tuple[str, ...], build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build("wheel", _copy(checkout_files, tmp_path_factory.mktemp("source") / "flashtune"))


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(folder), str(wheel)], check=True, timeout=1200)
    return folder


def _copy(names: tuple[str, ...], destination: Path) -> Path:
    for name in names:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return destination
