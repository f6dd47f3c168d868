"""Tests of the ptxas that compiles kernels."""

import os
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

from flashtune.core import machine
from flashtune.core.errors import MachineError
from flashtune.core.machine import PTXAS_PATH, set_ptxas_path
from flashtune.core.target import find_target
from flashtune.launch.tail_kernel import compile_clear


def test_path_of_ptxas_is_set_unless_it_is_set_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PTXAS_PATH, "of a user")
    machine.set_ptxas_path.__wrapped__()
    assert os.environ[PTXAS_PATH] == "of a user"
    monkeypatch.delenv(PTXAS_PATH)
    machine.set_ptxas_path.__wrapped__()
    assert os.environ[PTXAS_PATH] == get_ptxas(80).path
    monkeypatch.delenv(PTXAS_PATH)
    monkeypatch.setattr(os, "access", lambda *_: False)
    machine.set_ptxas_path.__wrapped__()
    assert PTXAS_PATH not in os.environ


def test_a_triton_without_a_backend_is_a_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.backends, "backends", {})
    monkeypatch.setattr(triton.compiler.compiler, "backends", {})
    with pytest.raises(MachineError, match="no backend for this GPU"):
        compile_clear(torch.float16, find_target("h200"))


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_kernels_have_the_ptxas_of_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    set_ptxas_path()
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
