"""Tests of the source cache: modified files are not loaded."""

import inspect
import linecache
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.codec import encode_record
from flashtune.launch import compilation
from flashtune.launch.compilation import kernel_folder, load_module
from flashtune.launch.kernel_cache import kernel_of
from tests.support.machine import PROBLEM
from tests.support.records import make_record

TARGET = find_target("h200")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel cache of the test's own. No kernel counts as loaded, since loading writes the copies."""
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    kernel_folder().mkdir(parents=True)
    for name in loaded_kernels():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in loaded_kernels():
        del sys.modules[name]


def loaded_kernels() -> list[str]:
    return [name for name in sys.modules if name.startswith("flashtune_kernel_")]


def copy_of(record: Record) -> Path:
    return kernel_folder() / f"{record.family}_{record.kernel}.py"


@pytest.mark.slow
def test_verified_cached_source_needs_no_template_engine(tmp_path: Path) -> None:
    record = make_record(PROBLEM)
    kernel = kernel_of(record, record.specialization)
    assert kernel.digest == record.kernel
    load_module(kernel)
    stored = tmp_path / "record.json"
    stored.write_bytes(encode_record(record))
    program = (
        "import sys, pathlib\n"
        "from flashtune.db.codec import decode_record\n"
        "from flashtune.launch.kernel_cache import kernel_of\n"
        f"record = decode_record(pathlib.Path({str(stored)!r}).read_bytes())\n"
        "kernel = kernel_of(record, record.specialization)\n"
        "assert kernel.digest == record.kernel\n"
        "print('jinja2' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize("content", ["raise SystemExit('tampered')\n", "", "\udcff"])
def test_modified_cached_source_is_rendered_again(content: str) -> None:
    record = make_record(PROBLEM)
    path = copy_of(record)
    path.write_bytes(content.encode(errors="surrogateescape"))
    kernel = kernel_of(record, record.specialization)
    assert kernel.digest == record.kernel
    assert "tampered" not in kernel.source
    assert load_module(kernel).launch_plan
    assert path.read_text() == kernel.source


def theirs(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file one that another user may have written."""
    if kind == "owner" and os.geteuid() == 0:
        os.chown(path, 1, -1)
    elif kind == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    elif kind == "link":
        path.symlink_to(path.rename(path.with_name("elsewhere.py")))
    elif kind in {"pipe", "device"}:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    else:
        path.chmod(int(kind, 8))


@pytest.mark.parametrize("kind", ["owner", "link", "pipe", "device", "664", "646"])
def test_file_that_others_may_have_written_is_not_used(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    record = make_record(PROBLEM)
    mine = kernel_of(record, record.specialization)
    path = copy_of(record)
    path.touch(0o644)
    path.write_text(f"# theirs\n{mine.source}")
    assert "# theirs" in kernel_of(record, record.specialization).source, "the digest is the same"
    theirs(path, kind, monkeypatch)
    assert "# theirs" not in kernel_of(record, record.specialization).source
    load_module(mine)
    assert path.read_text() == mine.source


@pytest.mark.parametrize("character", "\v\x1c\x85\u2028")
def test_compiler_reads_the_lines_that_python_executes(character: str) -> None:
    kernel = kernel_of(make_record(PROBLEM), Specialization())
    other = msgspec.structs.replace(kernel, source=kernel.source.replace("#", f"#{character}", 1))
    assert other.digest != kernel.digest
    functions = [getattr(load_module(rendered), kernel.entry) for rendered in (kernel, other)]
    assert functions[0].src == functions[1].src


def test_bytecode_next_to_cached_source_is_not_run() -> None:
    record = make_record(PROBLEM)
    kernel = kernel_of(record, record.specialization)
    path = copy_of(record)
    # Of the size and the time that Python's loader would compare.
    path.write_text("raise SystemExit('tampered')".ljust(len(kernel.source)))
    py_compile.compile(str(path), doraise=True)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(kernel.source)
    os.utime(path, ns=times)
    assert load_module(kernel).launch_plan


def test_source_replaced_by_another_installation_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(PROBLEM)
    mine = kernel_of(record, record.specialization)
    head, body = mine.source.rsplit(":\n    ", 1)
    theirs = msgspec.structs.replace(mine, source=f"{head}:  # a comment of another version\n    {body}")
    assert theirs.digest == mine.digest
    write = compilation._write_once
    monkeypatch.setattr(compilation, "_write_once", lambda path, _: write(path, theirs.source))
    function = getattr(load_module(mine), mine.entry)
    assert function.src in mine.source
    assert copy_of(record).read_text() == theirs.source
    linecache.checkcache()
    assert inspect.getsource(load_module(mine)) == mine.source


def test_other_specialisation_or_template_is_rendered() -> None:
    record = make_record(PROBLEM)
    load_module(kernel_of(record, record.specialization))
    unaligned = kernel_of(record, Specialization(Alignment.ANY))
    assert unaligned.digest != record.kernel
    other = msgspec.structs.replace(record.versions, template="0" * 32)
    copy_of(record).write_text("# of another template")
    old = msgspec.structs.replace(record, versions=other)
    assert "another template" not in kernel_of(old, record.specialization).source
