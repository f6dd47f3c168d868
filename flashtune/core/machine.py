"""Failures that the machine causes and no kernel: a full disk, a missing tool, too little memory.

Such a failure says nothing of the kernel that was being compiled, so nothing may be stored about the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flashtune.core.errors import MachineError

# The folder of rendered kernels in flashtune's own.
KERNELS = "kernels"
# A check of a folder writes this many bytes there, and wants this many bytes free.
PROBE_BYTES = 1 << 20
LEAST_FREE_BYTES = 8 << 20

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# There is no room, for want of space or by a limit.
CAPACITY = NO_SPACE | {errno.EFBIG, errno.EMFILE, errno.ENFILE}
NO_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# Signals that a process gets from outside: by an out-of-memory killer, a limit, a person, a disk that failed.
OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGBUS}
)
TRITON_TOOLS = frozenset({"ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm"})

FREE_MEMORY = "free some memory, raise the limit (`ulimit -v`), or use fewer processes (--jobs)"
FREE_SPACE = "free some space"
TOO_MANY = "too many files are open: raise the limit (`ulimit -n`), or use fewer processes (--jobs)"


def machine_fault(error: BaseException) -> str | None:
    """A sentence for an error that the machine caused, None for any other error.

    Args:
        error: What was raised while a kernel was compiled, loaded or launched.
    """
    return next(filter(None, map(_fault, _causes(error))), None)


@contextlib.contextmanager
def machine_errors() -> Iterator[None]:
    """Turns errors that the machine caused into `MachineError`; others pass.

    Raises:
        MachineError: The block failed because of the machine.
    """
    try:
        yield
    except MachineError:
        raise
    except Exception as error:
        fault = machine_fault(error)
        if fault is None:
            raise
        raise MachineError(fault) from error


def tool_failed(error: BaseException) -> bool:
    """Whether an error comes from a program that was run, such as ptxas: its failure may be the machine's."""
    return any(isinstance(cause, subprocess.SubprocessError) for cause in _causes(error))


def signal_fault(number: int, process: str) -> str | None:
    """A sentence for a process that a signal ended from outside, None for signals of a crash."""
    if number not in OUTSIDE_SIGNALS:
        return None
    if number == signal.SIGXFSZ:
        return f"{process} met the limit of a file's size: raise the limit (`ulimit -f`)"
    if number == signal.SIGXCPU:
        return f"{process} met the limit of CPU time: raise the limit (`ulimit -t`)"
    if number == signal.SIGKILL:
        return f"{process} was killed (signal 9), most likely for want of memory: {FREE_MEMORY}"
    return f"{process} was ended by signal {int(number)} from outside: start again when nothing ends it"


def cache_folder() -> Path:
    """The folder of flashtune: `FLASHTUNE_CACHE_DIR`, or one in the user's cache folder.

    Raises:
        MachineError: The user has no home folder.
    """
    named = os.environ.get("FLASHTUNE_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("flashtune")
    except RuntimeError:  # newer versions refuse a home that is not there, older ones return `~`
        folder = Path("~")
    if not folder.is_absolute():
        raise MachineError(
            "this user has no home folder: set HOME, or FLASHTUNE_CACHE_DIR and TRITON_CACHE_DIR"
        )
    return folder


def triton_folder() -> Path:
    """The folder where Triton keeps compiled kernels.

    Raises:
        MachineError: The user has no home folder.
    """
    from triton import knobs

    folder = Path(str(knobs.cache.dir))
    # Triton expands `~`, which stays where the user has no home.
    if folder.parts[:1] == ("~",):
        raise MachineError("this user has no home folder: set HOME, or TRITON_CACHE_DIR")
    return folder


class WrittenFolder(NamedTuple):
    """A folder that compiling writes.

    Attributes:
        what: What it is, as `the Triton cache`.
        where: Finds it.
        variable: The environment variable that names another.
    """

    what: str
    where: Callable[[], Path]
    variable: str


WRITTEN_FOLDERS = (
    WrittenFolder("the kernel cache", lambda: cache_folder() / KERNELS, "FLASHTUNE_CACHE_DIR"),
    WrittenFolder("the Triton cache", triton_folder, "TRITON_CACHE_DIR"),
    WrittenFolder("the temporary folder", lambda: Path(tempfile.gettempdir()), "TMPDIR"),
)


def written_folder_fault() -> str | None:
    """A sentence for the first folder that compiling writes and that cannot be written, None without one."""
    return next(filter(None, (folder_fault(*written) for written in WRITTEN_FOLDERS)), None)


def folder_fault(what: str, where: Callable[[], Path], variable: str) -> str | None:
    """A sentence for a folder that cannot be written or has no space left, None for one that is well.

    The folder is made if it is missing. The arguments are those of a `WrittenFolder`.
    """
    try:
        folder = where()
    except MachineError as error:
        return str(error)
    except OSError as error:
        # There is no folder at all for temporary files.
        return f"{error.strerror}: {FREE_SPACE}, or set {variable}"
    reason = writing_error(folder)
    return None if reason is None else unwritable(f"{what} {folder}", reason, f"set {variable}")


def writing_error(folder: Path) -> OSError | None:
    """Why a folder cannot take a file of a megabyte, None where it can. It is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
        space = os.statvfs(folder)
    except OSError as error:
        return error
    # A virtual file system that counts no blocks does not report its free space.
    if space.f_blocks and space.f_bavail * space.f_frsize < LEAST_FREE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def unwritable(where: str, error: OSError, instead: str) -> str:
    """A sentence for a place that cannot be written: why, and what to do besides what is said `instead`."""
    if error.errno in TOO_MANY_FILES:
        return TOO_MANY
    if error.errno in NO_SPACE:
        remedy = FREE_SPACE
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit of a file's size (`ulimit -f`)"
    else:
        remedy = "make it writable"
    return f"{where} cannot be written ({error.strerror}): {remedy}, or {instead}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from; of implicit causes only a program that failed counts."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        if cause.__cause__ is None and isinstance(cause.__context__, subprocess.SubprocessError):
            yield cause.__context__
        cause = cause.__cause__


def _fault(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return f"memory ran out: {FREE_MEMORY}"
    if isinstance(error, subprocess.CalledProcessError):
        return _program_fault(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _system_fault(error)
    text = str(error)
    if isinstance(error, OSError) and "AF_UNIX path too long" in text:
        # Python raises it without a number. Sockets of worker processes lie in the temporary folder.
        folder = f"the temporary folder {tempfile.gettempdir()}"
        return f"the path of {folder} is too long for a socket: set TMPDIR to a shorter path"
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text:
        return f"memory ran out: {FREE_MEMORY}"
    if isinstance(error, ImportError) and "failed to map segment" in text:
        return _mapping_fault(text)
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in text:
        return "Triton found no C compiler: install gcc or clang, or set CC"
    if isinstance(error, RuntimeError) and text.startswith("Cannot find ptxas"):
        return "Triton's ptxas is missing or does not run: reinstall triton, or unset TRITON_PTXAS_PATH"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return f"no thread can be started for want of memory or of processes (`ulimit -u`): {FREE_MEMORY}"
    return None


def _system_fault(error: OSError) -> str:
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    program = Path(name).name
    if error.errno in NO_SPACE or error.errno == errno.EFBIG:
        # A write names no file: the folder that is full is found by writing to each.
        place = f" at {name}" if name else ""
        return written_folder_fault() or (
            f"a file could not be written{place} ({error.strerror}): {FREE_SPACE}, or set TMPDIR"
        )
    if error.errno in NO_MEMORY:
        return f"memory ran out ({error.strerror}): {FREE_MEMORY}"
    if error.errno in TOO_MANY_FILES:
        return TOO_MANY
    if program in TRITON_TOOLS:
        return f"Triton's {program} cannot be run at {name} ({error.strerror}): reinstall triton"
    if name and name == os.environ.get("CC"):
        return f"the C compiler {name} cannot be run ({error.strerror}): set CC to one that works"
    return written_folder_fault() or (
        f"{name or 'the system'} failed while a kernel was compiled ({error.strerror}): "
        "run `flashtune doctor`, which checks this machine"
    )


def _program_fault(error: subprocess.CalledProcessError) -> str | None:
    """A sentence for a program that failed for no reason of the kernel's, None where it may have one."""
    command = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
    program = Path(command).name
    if error.returncode < 0:
        return signal_fault(-error.returncode, program)
    if program in TRITON_TOOLS or program.startswith(("ld", "lld")):
        return None
    # What a C compiler is given is the same for every kernel of a signature.
    return (
        f"the C compiler {command} failed (exit code {error.returncode}): install gcc or clang with Python's "
        "headers, or set CC"
    )


def _mapping_fault(text: str) -> str:
    name = text.partition(":")[0]
    if os.strerror(errno.EPERM) in text:
        return f"{name} cannot be loaded (its disk is mounted noexec): set TRITON_CACHE_DIR"
    return f"memory ran out while {name} was loaded: {FREE_MEMORY}"
