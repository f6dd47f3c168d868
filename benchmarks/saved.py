"""Saved results, each with its command, date, GPU and versions.

A script that measures writes its rows with `save`. benchmarks/results/sources.json lists results of older
scripts and of commands with other formats. On the machine of the run, this command compresses such a file and
adds it, with the present date, GPU and versions:

    python -m benchmarks.saved FILE "COMMAND"
"""

import argparse
import datetime
import gzip
import shlex
import sys
import zlib
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from flashtune.core.errors import TableError
from flashtune.core.files import replace_file
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/saved.py"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
SOURCES = RESULTS / "sources.json"
# Digests of the kernels that some runs were measured with, by benchmarks/headline.py.
KERNELS = RESULTS / "kernels.json"
# Further data of runs with numbers on the pages, outside of benchmarks/results.
ELSEWHERE = ("tests/data/mutants", "tests/data/truth")
SUFFIXES = (".json.gz", ".json.xz")

Kind = TypeVar("Kind")


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The source of a result."""

    command: str  # The command line.
    # The day of the run, or, where the run did not record it, of the commit that added the file.
    date: datetime.date
    gpu: str  # The GPU's name; `none` where no GPU was used.
    # Versions; `none` if not used.
    torch: str
    triton: str
    driver: str
    note: str = ""  # Remarks, such as an edit by hand.


class Saved(msgspec.Struct, Generic[Kind], frozen=True, forbid_unknown_fields=True):
    """A result and its source."""

    source: Source
    rows: Kind


def main() -> None:
    """Compresses and adds a file that does not name its source itself."""
    parser = argparse.ArgumentParser(description="Names what gave a file of results.")
    parser.add_argument("file", type=Path)
    parser.add_argument("command", help="the command line that wrote it")
    options = parser.parse_args()
    path: Path = options.file.resolve()
    if path.suffix != ".gz":
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
        path = packed
    name = path.relative_to(ROOT).as_posix()
    entries = msgspec.json.decode(SOURCES.read_bytes(), type=dict[str, Source])
    entries[name] = msgspec.structs.replace(this_run(), command=options.command)
    SOURCES.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")


def save(path: Path, rows: object) -> None:
    """Writes rows with the command line, the date, the GPU and the versions of this process."""
    write(path, msgspec.json.format(msgspec.json.encode(Saved(this_run(), rows)), indent=1) + b"\n")


def write(path: Path, content: bytes) -> None:
    """Replaces a file atomically. Makes its folder, and compresses a file that ends in `.gz`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def content(path: Path) -> bytes:
    """Returns the bytes of a file, unpacked if its name ends in `.gz`."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise TableError(f"{path} cannot be read: {error}") from error


def decoded(path: Path, kind: type[Kind]) -> Kind:
    """Returns the contents of a JSON file of results."""
    try:
        return msgspec.json.decode(content(path), type=kind)
    except msgspec.DecodeError as error:
        raise TableError(f"{path} holds no such results: {error}") from error


def load(path: Path, kind: type[Kind]) -> Saved[Kind]:
    """Reads a file of `save`."""
    return decoded(path, Saved[kind])  # type: ignore[valid-type]


def this_run() -> Source:
    """The command line, the date, the GPU and the versions of this process."""
    import torch
    import triton

    from flashtune.dispatch.versions import driver_version

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else f"python {shlex.quote(sys.argv[0])}"
    return Source(
        command=" ".join((program, *map(shlex.quote, sys.argv[1:]))),
        date=datetime.datetime.now(datetime.UTC).date(),
        gpu=gpu,
        torch=str(torch.__version__),
        triton=triton.__version__,
        driver=driver_version(),
    )


def run_of(source: Source, more: str = "") -> str:
    """Returns the GPU and the versions of a run, and `more`, for a line above its table."""
    return f"On an {source.gpu} (torch {source.torch}, Triton {source.triton}{more})"


def document(path: Path) -> Any:
    """Returns the plain values of a JSON file of results."""
    return decoded(path, object)


def result_files() -> tuple[str, ...]:
    """Every file of results, relative to the repository."""
    folders = (RESULTS, *(ROOT / folder for folder in ELSEWHERE))
    return tuple(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.name.endswith(SUFFIXES) and path not in (SOURCES, KERNELS)
    )


def sources() -> dict[str, Source]:
    """The source of each file of results, by its path."""
    entries = msgspec.json.decode(SOURCES.read_bytes(), type=dict[str, Source])
    files = result_files()
    for name in files:
        own = _own_source(ROOT / name)
        if own is not None and name in entries:
            raise TableError(f"{name} names its source itself: take it out of {SOURCES}")
        if own is not None:
            entries[name] = own
    missing, gone = set(files) - set(entries), set(entries) - set(files)
    if missing or gone:
        raise TableError(f"{SOURCES} lacks {sorted(missing)} and names {sorted(gone)}, which do not exist")
    return entries


def texts() -> dict[str, str]:
    """The table of all files of results, by name."""
    rows = []
    for name, source in sources().items():
        link = (
            f"[{Path(name).name}]({'' if name.startswith('benchmarks/results/') else '../../'}{_below(name)})"
        )
        command = f"`{source.command}`" + (f" ({source.note})" if source.note else "")
        rows.append((link, command, str(source.date), source.gpu, source.torch, source.triton, source.driver))
    lines = table(("file", "command", "date", "GPU", "torch", "Triton", "driver"), sorted(rows))
    return {"files": "\n".join(lines)}


def _below(name: str) -> str:
    return name.removeprefix("benchmarks/results/")


def _own_source(path: Path) -> Source | None:
    if path.suffix == ".xz":
        return None
    values = document(path)
    own = values.get("source") if isinstance(values, dict) else None
    return msgspec.convert(own, Source) if isinstance(own, dict) else None


if __name__ == "__main__":
    main()
