"""Tests of the versions that records are valid under."""

import subprocess
from pathlib import Path

import pytest
from triton.backends.nvidia.compiler import get_ptxas

from flashtune.core.errors import MachineError
from flashtune.dispatch import versions
from flashtune.dispatch.versions import current_versions


def test_ptxas_version_is_the_one_for_hopper() -> None:
    said = subprocess.run([get_ptxas(90).path, "--version"], capture_output=True, text=True, check=True)
    assert f"release {current_versions('forward_q_outer').ptxas}," in said.stdout


def test_ptxas_without_permission_to_execute_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    with pytest.raises(MachineError, match=r"Triton's ptxas cannot be run at .*Permission denied"):
        versions._ptxas_version()
