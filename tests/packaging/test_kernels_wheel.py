"""Tests of the wheel with a bundle."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.core import VERSION
from flashtune.core.errors import BundleError
from flashtune.core.target import find_target
from flashtune.tuner.analysis.doctor import Level, bundles
from scripts import kernels_wheel
from scripts.kernels_wheel import make_wheel
from tests.bundle.conftest import make_entry

# Bytes of all other files, and more.
METADATA = 4096


def bundle_file(folder: Path, version: str) -> Path:
    entry, codes = make_entry(1, b"code")
    path = folder / "verified.bundle"
    path.write_bytes(dump_bundle("sm_90", version, [entry], codes))
    return path


@pytest.mark.slow
def test_bundle_of_an_installed_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHTUNE_BUNDLE", raising=False)
    file = bundle_file(tmp_path, VERSION)
    answer = make_wheel(file, tmp_path / "dist")
    assert answer == "1 kernels for sm_90, 1 of them verified, by Triton 3.7.1 with ptxas 12.8"
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"flashtune_kernels_sm90-{VERSION}-py3-none-any.whl"
    assert wheel.stat().st_size < file.stat().st_size + METADATA, "the page states the size of the bundle"
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    installed = site / "flashtune_kernels_sm90" / "kernels.bundle"
    assert installed.read_bytes() == file.read_bytes()
    findings = [(found.level, found.message) for found in bundles(find_target("h200"))]
    assert findings == [(Level.OK, f"{installed}, 1 kernels for sm_90")]


def test_bundle_of_another_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"was written by flashtune 0\.0, .* build it again"):
        make_wheel(bundle_file(tmp_path, "0.0"), tmp_path)


def test_bundle_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_wheel, "MAX_BYTES", 100)
    with pytest.raises(BundleError, match=r"MB, and a wheel of kernels has at most .*: build it of fewer"):
        make_wheel(bundle_file(tmp_path, VERSION), tmp_path)
