"""Compiled kernels as files of Triton's cache, to send them from one machine to another."""

import io
import re
import zipfile
from pathlib import Path

import msgspec

from flashtune.core.errors import TableError
from flashtune.core.files import replace_file
from flashtune.core.kernel import Kernel
from flashtune.core.machine import machine_errors
from flashtune.core.target import Target
from flashtune.launch.compilation import compile_kernel

# A file of Triton's cache: the folder of one kernel, and the name of a file or of its list of files.
MEMBER = re.compile(r"[A-Za-z0-9_-]{16,80}/(__grp__)?[A-Za-z0-9_]{1,200}\.(json|ptx|cubin|amdgcn|hsaco)")
LIST = "__grp__"
MAX_UNPACKED = 8 * 2**24


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
    """Adds the files of a compiled kernel to Triton's cache.

    Raises:
        TableError: They are no files of Triton's cache, or too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(files)) as archive:
            members = archive.infolist()
            wrong = not all(MEMBER.fullmatch(member.filename) for member in members)
            if wrong or sum(member.file_size for member in members) > MAX_UNPACKED:
                raise TableError("compiled files have wrong names or are too large")
            contents = {member.filename: archive.read(member) for member in members}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise TableError("compiled files are damaged") from error
    # Triton reads the list first, so it is written last.
    for name in sorted(contents, key=lambda name: LIST in name):
        path, content = folder / name, contents[name]
        if LIST in name:
            try:
                listed = msgspec.json.decode(content, type=FileList)
            except msgspec.DecodeError as error:
                raise TableError("a list of compiled files is damaged") from error
            present = (child for child in listed.child_paths if f"{path.parent.name}/{child}" in contents)
            own = {child: str(path.parent / child) for child in present}
            content = msgspec.json.encode(FileList(own))
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
