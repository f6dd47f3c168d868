"""Compiled kernels as files of Triton's cache, to send them from one machine to another."""

import io
import re
import struct
import zipfile
import zlib
from pathlib import Path

import msgspec

from flashtune.core.decoders import json_decoder
from flashtune.core.errors import TableError
from flashtune.core.files import replace_file
from flashtune.core.kernel import Kernel
from flashtune.core.machine import machine_errors
from flashtune.core.target import Target
from flashtune.db.codec import UNDECODABLE
from flashtune.launch.compilation import compile_kernel

# A file of Triton's cache: the folder of one kernel, and the name of a file or of its list of files.
MEMBER = re.compile(r"[A-Za-z0-9_-]{16,80}/(__grp__)?[A-Za-z0-9_]{1,200}\.(json|ptx|cubin|amdgcn|hsaco)")
LIST = "__grp__"
MAX_UNPACKED = 8 * 2**24
MAX_MEMBERS = 64
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# The errors of `zipfile` for bytes of any origin.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(NotImplementedError, RuntimeError, EOFError, OSError, ValueError),
)
# A file that marks a folder with kernels of other machines.
RECEIVED = "received-kernels"


class FileList(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's list of the files of one kernel, by name."""

    child_paths: dict[str, str]


@machine_errors()
def pack_files(kernel: Kernel, target: Target) -> bytes:
    """Returns the files of a kernel and its steps as an archive. Compiles those that Triton's cache lacks.

    Raises:
        KernelError: The kernel does not compile.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in kernel.parts:
            paths = [Path(path) for path in compile_kernel(part, target).metadata_group.values()]
            lists = [path.with_name(f"{LIST}{path.name}") for path in paths if path.suffix == ".json"]
            for path in (*paths, *lists):
                name = f"{path.parent.name}/{path.name}"
                if MEMBER.fullmatch(name):
                    archive.write(path, name)
    return packed.getvalue()


def unpack_files(files: bytes, folder: Path) -> None:
    """Adds the files of a compiled kernel to Triton's cache, and marks it for `has_received`.

    Raises:
        TableError: They are no files of Triton's cache, or too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(files)) as archive:
            members = archive.infolist()
            known = all(
                MEMBER.fullmatch(member.filename) and member.compress_type in METHODS for member in members
            )
            size = sum(member.file_size for member in members)
            if not known or len(members) > MAX_MEMBERS or size > MAX_UNPACKED:
                raise TableError("compiled files have wrong names or are too large")
            contents = {Path(member.filename): archive.read(member) for member in members}
    except TableError:
        raise
    except UNREADABLE as error:
        raise TableError("compiled files are damaged") from error
    lists = {path: _local_list(path, contents, folder) for path in contents if LIST in path.name}
    # Before the files, so that the mark is there if this process is killed.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECEIVED).touch()
    # Triton reads the list first, so it is written last.
    for path in sorted(contents, key=lambda path: path in lists):
        (folder / path).parent.mkdir(exist_ok=True)
        replace_file(folder / path, lists.get(path, contents[path]))


def has_received(folder: Path) -> bool:
    """Returns whether a folder of Triton's cache may have kernels that another machine compiled."""
    return (folder / RECEIVED).exists()


def _local_list(path: Path, contents: dict[Path, bytes], folder: Path) -> bytes:
    """Returns a list of files with the paths of this machine."""
    try:
        listed = json_decoder(FileList).decode(contents[path])
    except UNDECODABLE as error:
        raise TableError("a list of compiled files is damaged") from error
    present = [name for name in listed.child_paths if path.parent / name in contents]
    return msgspec.json.encode(FileList({name: str(folder / path.parent / name) for name in present}))
