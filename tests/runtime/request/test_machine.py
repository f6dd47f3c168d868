"""Tests that machine errors are distinguished from kernel errors by type and errno."""

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from flashtune.core import machine
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.machine import (
    address_space_fault,
    machine_errors,
    machine_fault,
    tool_failed,
    written_folder_fault,
)
from flashtune.launch.compilation import kernel_folder


def system_error(number: int, name: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), name)


def of_c_compiler() -> RuntimeError:
    return RuntimeError(
        "Failed to find C compiler. Please specify via CC environment variable or set knobs.build.impl."
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory ran out"),
        (system_error(errno.ENOMEM), "memory ran out"),
        (system_error(errno.EMFILE), "too many files are open: raise the limit"),
        (
            system_error(errno.ENOSPC, "/x/kernel.ptx"),
            "/x/kernel.ptx .*No space left on device.*free some space",
        ),
        (system_error(errno.EDQUOT, "/x/kernel.ptx"), "quota exceeded.*free some space"),
        (system_error(errno.EROFS, "/x/kernel.ptx"), "/x/kernel.ptx .*Read-only file system"),
        (
            system_error(errno.EACCES, "/x/bin/ptxas"),
            "Triton's ptxas cannot be run at /x/bin/ptxas.*reinstall",
        ),
        (system_error(errno.ENOENT, "/x/bin/cuobjdump"), "Triton's cuobjdump cannot be run"),
        (of_c_compiler(), "no C compiler: install gcc or clang, or set CC"),
        (RuntimeError("Cannot find ptxas"), "Triton's ptxas is missing"),
        (RuntimeError("0 compatible backends for target (cuda) ([])."), "no backend .* reinstall triton"),
        (RuntimeError("can't start new thread"), "no thread can be started"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "x.c"]), "C compiler /usr/bin/gcc failed"),
        (subprocess.CalledProcessError(-9, ["/x/ptxas", "x.ptx"]), "ptxas was killed .signal 9."),
        (subprocess.CalledProcessError(-25, ["/x/ptxas"]), "ptxas met the limit of a file's size"),
        (ImportError("/x/a.so: failed to map segment from shared object"), "memory ran out while /x/a.so"),
        (
            ImportError("/x/a.so: failed to map segment from shared object: Operation not permitted"),
            "/x/a.so cannot be loaded .*noexec.*TRITON_CACHE_DIR",
        ),
    ],
)
def test_machine_error_is_one_sentence(error: Exception, words: str) -> None:
    fault = machine_fault(error)
    assert fault is not None
    assert re.search(words, fault), fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed"),
        ValueError("Shapes do not match"),
        # inspect raises it, and no system call failed.
        OSError("could not get source code"),
        subprocess.CalledProcessError(255, ["/x/ptxas", "x.ptx"]),
        subprocess.CalledProcessError(-signal.SIGSEGV, ["/x/ptxas", "x.ptx"]),
    ],
)
def test_kernel_error_is_not_a_machine_fault(error: Exception) -> None:
    assert machine_fault(error) is None


def test_overlong_socket_path_error_suggests_a_shorter_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 120)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with socket.socket(socket.AF_UNIX) as made, pytest.raises(OSError, match="AF_UNIX") as caught:
        made.bind(str(folder / "listener"))
    fault = machine_fault(caught.value)
    assert fault == (
        f"the path of the temporary folder {folder} is too long for a socket: set TMPDIR to a shorter path"
    )


def test_causes_are_inspected_but_handled_errors_are_not() -> None:
    outer = KernelError("it does not compile")
    outer.__cause__ = system_error(errno.EMFILE)
    assert machine_fault(outer) is not None
    handled = RuntimeError("PassManager::run failed")
    # Triton looks for a file in its cache, finds none, and goes on.
    handled.__context__ = system_error(errno.ENOENT, "/x/cache/kernel.json")
    assert machine_fault(handled) is None


def test_failed_program_is_found_as_cause_of_a_compiler_error() -> None:
    own = RuntimeError("PTXAS error: Internal Triton PTX codegen error")
    own.__context__ = subprocess.CalledProcessError(255, ["/x/ptxas"])
    wrapped = KernelError("it does not compile")
    wrapped.__cause__ = own
    assert tool_failed(wrapped)
    assert machine_fault(wrapped) is None
    own.__context__ = subprocess.CalledProcessError(-9, ["/x/ptxas"])
    assert "ptxas was killed" in (machine_fault(wrapped) or "")
    assert not tool_failed(KernelError("it does not compile"))


def test_context_manager_converts_only_machine_errors() -> None:
    with pytest.raises(MachineError, match="memory ran out"), machine_errors():
        raise MemoryError
    with pytest.raises(ValueError, match="else"), machine_errors():
        raise ValueError("else")


def test_missing_home_folder_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHTUNE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # As for a user id that no password file knows.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(MachineError, match="no home folder: set HOME, or FLASHTUNE_CACHE_DIR"):
        kernel_folder()
    assert "no home folder" in (written_folder_fault() or "")


def test_torch_allocation_failure_is_a_machine_fault() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(machine_fault(caught.value)).startswith("memory ran out")


@pytest.mark.parametrize(("blocks", "is_full"), [(0, False), (1000, True)])
def test_a_file_system_without_blocks_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, is_full: bool
) -> None:
    space = os.statvfs_result((4096, 4096, blocks, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    assert (machine.writing_error(tmp_path) is not None) == is_full


@pytest.mark.parametrize(("limit", "is_fault"), [(300 << 20, True), (64 << 30, False), (-1, False)])
def test_memory_limit_is_compared_with_library_size(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_fault: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    fault = address_space_fault()
    assert (fault is not None) == is_fault
    assert not fault or re.search(r"limit of 300 MiB .* have \d{3,} MiB: raise the limit", fault)
