"""Tests of the ptxas that compiles kernels."""

import os
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

from flashtune.core import machine
from flashtune.core.machine import PTXAS_PATH, ptxas_version
from flashtune.core.target import find_target
from flashtune.launch.tail_kernel import compile_clear


def test_reading_the_version_of_ptxas_fixes_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, kept in ((None, get_ptxas(80).path), ("of a user", "of a user")):
        monkeypatch.setenv(PTXAS_PATH, path or "")
        if path is None:
            monkeypatch.delenv(PTXAS_PATH)
        machine.ptxas_version.__wrapped__()
        assert os.environ[PTXAS_PATH] == kept


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_kernels_have_the_ptxas_of_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    ptxas_version()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    arch = find_target(target).triton_target().arch
    # As if Triton had compiled a kernel before the path changed.
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.1, V99.1.2\n")
    other.chmod(0o755)
    with monkeypatch.context() as before:
        for variable in (PTXAS_PATH, "TRITON_PTXAS_BLACKWELL_PATH"):
            before.setenv(variable, str(other))
        get_ptxas_version.cache_clear()
        assert "release 99.1," in get_ptxas_version(arch)
    assert compile_clear(torch.float16, find_target(target)).asm["cubin"]
    assert f"release {get_ptxas(arch).version}," in get_ptxas_version(arch)
