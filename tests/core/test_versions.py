"""The versions that records are keyed by are those of what runs."""

from __future__ import annotations

import subprocess

from triton.backends.nvidia.compiler import get_ptxas

from flashtune.dispatch.versions import current_versions


def test_the_assembler_is_the_one_that_compiles_for_hopper() -> None:
    said = subprocess.run([get_ptxas(90).path, "--version"], capture_output=True, text=True, check=True)
    assert f"release {current_versions('forward_q_outer').ptxas}," in said.stdout
