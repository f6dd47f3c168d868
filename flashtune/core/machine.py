"""Failures that the machine causes, not the kernel: a full disk, a missing tool, too little memory.

Such a failure gives no information about the kernel, so no result is stored for the kernel. The versions of
installed packages are read here too, also of packages without metadata: vendored, frozen, or in an archive.
"""

import contextlib
import errno
import functools
import importlib.util
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flashtune.core.errors import MachineError, UsageError

# Environment variables of users. Only this module reads them, except the last one, which is an option's.
DATABASE_VARIABLE = "FLASHTUNE_DB"
CACHE_VARIABLE = "FLASHTUNE_CACHE_DIR"
RECORD_VARIABLE = "FLASHTUNE_RECORD"
CHECK_VARIABLE = "FLASHTUNE_CHECK"
TARGET_VARIABLE = "FLASHTUNE_TARGET"
TRITON_CACHE = "TRITON_CACHE_DIR"
CONTROL_CODES = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Limits of Linux, less the endings and files that are added to a path.
MAX_NAME_BYTES = 255 - 32
MAX_PATH_BYTES = 4096 - 512

# The subfolder of flashtune's cache folder for rendered kernels.
KERNELS = "kernels"
# A check of a folder writes this many bytes, and requires this many free bytes.
PROBE_BYTES = 1 << 20
MIN_FREE_BYTES = 8 << 20

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# A limit or a full disk prevents a write.
CAPACITY = NO_SPACE | {errno.EFBIG, errno.EMFILE, errno.ENFILE}
NO_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# Signals from outside: the out-of-memory killer, a limit, a person, or a failed disk.
OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGBUS}
)
TRITON_TOOLS = frozenset({"ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm"})

FREE_MEMORY = "free some memory, raise the limit (`ulimit -v`), or use fewer processes (--jobs)"
FREE_SPACE = "free some space"
TOO_MANY = "too many files are open: raise the limit (`ulimit -n`), or use fewer processes (--jobs)"

# The libraries of torch and Triton. At least this fraction of their bytes is loaded.
LIBRARIES = (("torch", "lib/*.so*"), ("triton", "_C/*.so"))
LOADED_SHARE = 0.75
# Value of the version of software that is not installed.
NOT_INSTALLED = "none"
TRITON_VERSION = re.compile(r"^__version__ = ['\"](.+)['\"]$", re.MULTILINE)
PTXAS_RELEASE = re.compile(r"release (\d+\.\d+)")
# Variables of Triton that change the machine code of a kernel, even the one that removes line information.
CODE_VARIABLES = ("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "TRITON_DISABLE_LINE_INFO")
PTXAS_PATH = "TRITON_PTXAS_PATH"
# Triton's folder of NVIDIA's programs.
TOOLS = "backends/nvidia/bin"


def machine_fault(error: BaseException) -> str | None:
    """Returns a sentence for an error that the machine caused, None for any other error."""
    return next(filter(None, map(_fault, _causes(error))), None)


@contextlib.contextmanager
def machine_errors() -> Iterator[None]:
    """Converts errors that the machine caused into `MachineError`. Other errors are unchanged."""
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
    """Returns whether an error comes from a subprocess such as ptxas: the machine may have caused it."""
    return any(isinstance(cause, subprocess.SubprocessError) for cause in _causes(error))


def signal_fault(number: int, process: str) -> str | None:
    """Returns a sentence for a process that a signal ended from outside, None for signals of a crash."""
    if number not in OUTSIDE_SIGNALS:
        return None
    if number == signal.SIGXFSZ:
        return f"{process} met the limit of a file's size: raise the limit (`ulimit -f`)"
    if number == signal.SIGXCPU:
        return f"{process} met the limit of CPU time: raise the limit (`ulimit -t`)"
    if number == signal.SIGKILL:
        return f"{process} was killed (signal 9), most likely for want of memory: {FREE_MEMORY}"
    return f"{process} was ended by signal {int(number)} from outside: start again when nothing ends it"


def variable(name: str) -> str:
    """Returns the value of an environment variable, empty without one."""
    value = os.environ.get(name, "")
    if CONTROL_CODES.search(value):
        raise UsageError(f"{name} has control codes: set it to printable text, or unset it")
    return value


def user_path(text: str, source: str) -> Path:
    """Returns the absolute path that a user named, with `~` expanded.

    `source` is the option or variable that has it, for errors.
    """
    if CONTROL_CODES.search(text):
        raise UsageError(f"{source} has control codes: write a path of printable text")
    try:
        path = Path(text).expanduser().absolute()
        sizes = [len(os.fsencode(part)) for part in path.parts]
    except RuntimeError as error:
        raise UsageError(f"{source} begins with ~ and no such home folder is known: write it out") from error
    except ValueError as error:
        raise UsageError(f"{source} is not a path ({error}): write another") from error
    except OSError as error:
        raise UsageError(f"{source} is relative to a folder that was deleted: change the folder") from error
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        raise UsageError(f"{source} is too long for a path: write a shorter one")
    return path


def cache_folder() -> Path:
    """Returns flashtune's cache folder: `FLASHTUNE_CACHE_DIR`, or one in the user's cache folder."""
    try:
        named = variable(CACHE_VARIABLE)
        if named:
            return user_path(named, CACHE_VARIABLE)
    except UsageError as error:
        raise MachineError(str(error)) from error
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("flashtune")
    except RuntimeError:  # newer versions raise without a home folder, older ones return `~`
        folder = Path("~")
    if not folder.is_absolute():
        raise MachineError(
            "this user has no home folder: set HOME, or FLASHTUNE_CACHE_DIR and TRITON_CACHE_DIR"
        )
    return folder


def triton_folder() -> Path:
    """Returns the folder of Triton's compiled kernels."""
    from triton import knobs

    folder = Path(str(knobs.cache.dir))
    # Triton expands `~`, which has no effect if the user has no home folder.
    if folder.parts[:1] == ("~",):
        raise MachineError("this user has no home folder: set HOME, or TRITON_CACHE_DIR")
    return folder


def use_own_triton_folder() -> None:
    """Gives this program and its processes a Triton cache of their own, unless the user set one.

    Kernels that other machines compiled then do not reach other programs. Call it before processes start.
    """
    if not os.environ.get(TRITON_CACHE):
        os.environ[TRITON_CACHE] = str(cache_folder() / "worker-triton")


def temporary_folder() -> Path:
    """Returns the folder of temporary files, of ptxas and the C compiler too.

    Python passes over a full folder, which these programs still use.
    """
    for name in filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))):
        with contextlib.suppress(OSError):  # a name that is too long, or relative to a deleted folder
            folder = Path(name).absolute()
            if folder.is_dir():
                return folder
    return Path(tempfile.gettempdir())


class WrittenFolder(NamedTuple):
    """A folder to which a compilation writes."""

    what: str  # A description, such as `the Triton cache`.
    where: Callable[[], Path]  # Returns the folder.
    variable: str  # The environment variable that sets the folder.


WRITTEN_FOLDERS = (
    WrittenFolder("the kernel cache", lambda: cache_folder() / KERNELS, CACHE_VARIABLE),
    WrittenFolder("the Triton cache", triton_folder, TRITON_CACHE),
    WrittenFolder("the temporary folder", temporary_folder, "TMPDIR"),
)


def written_folder_fault() -> str | None:
    """Returns a sentence for the first folder of a compilation that is not writable, None without one."""
    return next(filter(None, (folder_fault(*written) for written in WRITTEN_FOLDERS)), None)


def folder_fault(what: str, where: Callable[[], Path], variable: str) -> str | None:
    """Returns a sentence for a folder that is full or not writable, otherwise None.

    Creates a missing folder. The arguments are those of a `WrittenFolder`.
    """
    try:
        folder = where()
    except MachineError as error:
        return str(error)
    except OSError as error:
        # No folder for temporary files exists.
        return f"{error.strerror}: {FREE_SPACE}, or set {variable}"
    reason = writing_error(folder)
    return None if reason is None else unwritable(f"{what} {folder}", reason, f"set {variable}")


def writing_error(folder: Path) -> OSError | None:
    """Returns the error of a write of 1 MiB to a folder, None if it succeeds. Creates a missing folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
        space = os.statvfs(folder)
    except OSError as error:
        return error
    # Virtual file systems may have no block count, and thus no free space to report.
    if space.f_blocks and space.f_bavail * space.f_frsize < MIN_FREE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def unwritable(where: str, error: OSError, instead: str) -> str:
    """Returns a sentence for a place that is not writable: the reason, a remedy, and `instead`."""
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
    """Yields an error and its explicit causes. The only implicit cause that counts is a failed subprocess."""
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
        # Python raises it without an errno. Sockets of worker processes are in the temporary folder.
        folder = f"the temporary folder {tempfile.gettempdir()}"
        return f"the path of {folder} is too long for a socket: set TMPDIR to a shorter path"
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text:
        return f"memory ran out: {FREE_MEMORY}"
    if isinstance(error, ImportError) and "failed to map segment" in text:
        return _mapping_fault(text)
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in text:
        return "Triton found no C compiler: install gcc or clang, or set CC"
    if isinstance(error, RuntimeError) and text.startswith("Cannot find ptxas"):
        return f"Triton's ptxas is missing or does not run: reinstall triton, or unset {PTXAS_PATH}"
    if isinstance(error, RuntimeError) and text.startswith("0 compatible backends"):
        return "Triton found no backend for this GPU: reinstall triton, or raise the limit (`ulimit -n`)"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return f"no thread can be started for want of memory or of processes (`ulimit -u`): {FREE_MEMORY}"
    return None


def _system_fault(error: OSError) -> str:
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    program = Path(name).name
    if error.errno in NO_SPACE or error.errno == errno.EFBIG:
        # The error of a write has no file name: the check of each folder finds the full one.
        location = f" at {name}" if name else ""
        return written_folder_fault() or (
            f"a file could not be written{location} ({error.strerror}): {FREE_SPACE}, or set TMPDIR"
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
    """Returns a sentence for a failed program if the kernel cannot be the cause, otherwise None."""
    command = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
    program = Path(command).name
    if error.returncode < 0:
        return signal_fault(-error.returncode, program)
    if program in TRITON_TOOLS or program.startswith(("ld", "lld")):
        return None
    # The input of the C compiler is the same for every kernel of a signature.
    return (
        f"the C compiler {command} failed (exit code {error.returncode}): install gcc or clang with Python's "
        "headers, or set CC"
    )


def _mapping_fault(text: str) -> str:
    name = text.partition(":")[0]
    if os.strerror(errno.EPERM) in text:
        return f"{name} cannot be loaded (its disk is mounted noexec): set TRITON_CACHE_DIR"
    return f"memory ran out while {name} was loaded: {FREE_MEMORY}"


def address_space_fault() -> str | None:
    """Returns a sentence for a memory limit that is too low for torch and Triton, otherwise None.

    Under such a limit their libraries raise, abort the process or hang.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    needed = sum(file.stat().st_size for pattern in LIBRARIES for file in _files(*pattern))
    if limit >= LOADED_SHARE * needed:
        return None
    return (
        f"the limit of {limit >> 20} MiB of memory is too low for torch and Triton, whose libraries have "
        f"{needed >> 20} MiB: raise the limit (`ulimit -v`)"
    )


def _files(package: str, pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from Path(folder).glob(pattern)


def installed_version(package: str) -> str:
    """Returns the version of a package, by its metadata if it has some, and else by its module."""
    # Slow to import, and commands without a GPU need it late or not at all.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = importlib.import_module(package.replace("-", "_"))
    try:
        return str(module.__version__)
    except AttributeError as error:
        raise ImportError(f"{package} has neither metadata nor a version") from error


def torch_version() -> str:
    """Returns `torch.__version__`, if possible without importing torch, which takes 1.5 s of CPU time.

    The version in the package's metadata may lack the part after `+`, such as `cu130`.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch reads its version from this file, which does not import torch.
        file = Path(spec.origin).with_name("version.py")
        if file.is_file():
            return str(runpy.run_path(str(file))["__version__"])
    return str(importlib.import_module("torch").__version__)


def triton_version() -> str:
    """Returns `triton.__version__`, without importing Triton if the version is in its source.

    Returns `none` if Triton is not installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return NOT_INSTALLED
    if spec.origin is not None and Path(spec.origin).is_file():
        stated = TRITON_VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
        if stated is not None:
            return stated[1]
    return str(importlib.import_module("triton").__version__)


@functools.cache
def set_ptxas_path() -> None:
    """Sets `TRITON_PTXAS_PATH` to Triton's ptxas, unless it is set.

    torch.compile also sets an unset path, to the ptxas of torch's wheel. It may do so between two kernels.
    """
    for path in _files("triton", f"{TOOLS}/ptxas"):
        if os.access(path, os.X_OK):
            os.environ.setdefault(PTXAS_PATH, str(path))


@functools.cache
def ptxas_version() -> str:
    """Returns the version of the ptxas that Triton runs for Hopper, without importing Triton.

    Variables that change its machine code are part of the version, so that no receipt covers that code.
    Returns `none` if there is no such program. Sets the path of ptxas, as `set_ptxas_path` does.
    """
    set_ptxas_path()
    changes = [f" {name}={value}" for name in CODE_VARIABLES if (value := variable(name))]
    # From 3.9 on, Triton compiles for Hopper by the program that was for newer GPUs alone.
    is_newer = tuple(map(int, re.findall(r"\d+", triton_version())[:2])) >= (3, 9)
    program = "ptxas-blackwell" if is_newer else "ptxas"
    named = filter(None, [os.environ.get(f"TRITON_{program.replace('-', '_').upper()}_PATH")])
    for path in (*named, *map(str, _files("triton", f"{TOOLS}/{program}"))):
        with machine_errors(), contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            said = subprocess.check_output([path, "--version"], stderr=subprocess.STDOUT, text=True)
            stated = PTXAS_RELEASE.search(said)
            if stated is not None:
                return stated[1] + "".join(changes)
    return NOT_INSTALLED
