"""Tests of targets, versions, caches with a limit, and the replacement of files."""

import os
import subprocess
from pathlib import Path

import pytest
from triton.backends.nvidia.compiler import get_ptxas

from flashtune.core import machine
from flashtune.core.caches import keep
from flashtune.core.errors import MachineError, TargetError
from flashtune.core.files import replace_file
from flashtune.core.target import TARGETS, find_target
from flashtune.dispatch.versions import current_versions


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


def test_a_full_cache_is_cleared_whole() -> None:
    cache: dict[int, int] = {}
    for number in range(3):
        keep(cache, number, number, limit=3)
    assert len(cache) == 3
    keep(cache, 3, 3, limit=3)
    assert cache == {3: 3}


@pytest.mark.parametrize("name", ["h200", "nvidia-h200", "NVIDIA H200", " H200 "])
def test_find_target_accepts_common_names(name: str) -> None:
    assert find_target(name).name == "nvidia-h200"


def test_unknown_target_error_lists_known_targets() -> None:
    with pytest.raises(TargetError, match=r"there is no target 'h900': choose one of a100, .*mi300x"):
        find_target("h900")


def test_sram_capacities_match_vendor_guides() -> None:
    capacities = {target.arch: target.sram_per_block for target in TARGETS}
    assert capacities == {
        "sm_80": 166912,
        "sm_89": 101376,
        "sm_90": 232448,
        "sm_100": 232448,
        "sm_120": 101376,
        "gfx942": 65536,
    }


def test_ptxas_version_is_the_one_for_hopper() -> None:
    said = subprocess.run([get_ptxas(90).path, "--version"], capture_output=True, text=True, check=True)
    assert f"release {current_versions('forward_q_outer').ptxas}," in said.stdout


@pytest.mark.parametrize(
    ("triton", "program"),
    [
        ("3.6.0", "ptxas"),
        ("3.8.1", "ptxas"),
        ("3.9.0", "ptxas-blackwell"),
        ("3.10.0+git1", "ptxas-blackwell"),
    ],
)
def test_ptxas_of_newer_tritons_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triton: str, program: str
) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.1, V99.1.2\n")
    tool.chmod(0o755)
    monkeypatch.setattr(machine, "triton_version", lambda: triton)
    for name in ("ptxas", "ptxas-blackwell"):
        monkeypatch.delenv(variable := f"TRITON_{name.replace('-', '_').upper()}_PATH", raising=False)
        if name == program:
            monkeypatch.setenv(variable, str(tool))
    assert machine.ptxas_version.__wrapped__() == "99.1"


@pytest.mark.parametrize(("name", "value"), [("TRITON_DISABLE_LINE_INFO", "1"), ("PTXAS_OPTIONS", "-O0")])
def test_variable_that_changes_machine_code_is_part_of_the_version_of_ptxas(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    version = machine.ptxas_version.__wrapped__()
    monkeypatch.setenv(name, value)
    assert machine.ptxas_version.__wrapped__() == f"{version} {name}={value}"


def test_ptxas_without_permission_to_execute_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("")
    monkeypatch.setattr(machine, "triton_version", lambda: "3.6.0")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    with pytest.raises(MachineError, match=r"Triton's ptxas cannot be run at .*Permission denied"):
        machine.ptxas_version.__wrapped__()
