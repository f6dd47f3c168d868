"""Tests of compilation on other machines, and of hostile files."""

import io
import os
import zipfile
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import create_engine, text

from flashtune import testing
from flashtune.core.errors import MachineError, TableError
from flashtune.core.kernel import Kernel
from flashtune.core.target import find_target
from flashtune.db.queue import JobSpec, Queue
from flashtune.launch.compilation import is_compiled
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.execution.compiled_files import MAX_UNPACKED, FileList, has_received, unpack_files
from flashtune.tuner.execution.processes import Workers, start_server
from flashtune.tuner.fleet import compile_ahead
from flashtune.tuner.fleet.jobs import queue_versions

A100 = find_target("a100")
PROBLEM = testing.problem("heads=1,seqlen=64,head_dim=16,dtype=fp16")
FAMILY = "forward_q_outer"
FOLDER = "A" * 52


def archive(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as files:
        for name, content in members.items():
            files.writestr(name, content)
    return packed.getvalue()


@pytest.mark.slow
def test_worker_of_another_machine_compiles_the_likely_kernels(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server's processes have the other machine's cache.
    start_server()
    monkeypatch.setattr(compile_ahead, "LIKELY", 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    family = find_family(FAMILY)
    config = family.default(PROBLEM, A100)
    kernel: Kernel = render(family, PROBLEM, config, contiguous_specialization(PROBLEM))
    with Queue(postgres) as queue:
        queue.enqueue([JobSpec(problem=PROBLEM, target=A100.name, families=(FAMILY,))], queue_versions())
        events = list(compile_ahead.compile_ahead(queue, A100, 2, exit_when_empty=True))
        files = queue.new_files(1, set())
        assert events == [(1, len(files))]
        assert set(queue.new_files(1, {kernel.digest})) == set(files) - {kernel.digest}
        # Another worker finds nothing to compile.
        assert list(compile_ahead.compile_ahead(queue, A100, 2, exit_when_empty=True)) == [(1, 0)]
        assert not is_compiled(kernel, A100)
        unpack_files(files[kernel.digest], tmp_path / "own")
        assert is_compiled(kernel, A100)
        queue.cancel(None, (1,))
        queue.batches()
        assert queue.new_files(1, set()) == {}
        assert not queue.take_kernel(1, "0" * 32)


def test_machine_that_cannot_compile_ends_its_worker(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(*_: object) -> Future[bytes]:
        done: Future[bytes] = Future()
        done.set_exception(MachineError("the disk is full"))
        return done

    monkeypatch.setattr(Workers, "schedule", schedule)
    with Queue(postgres) as queue:
        queue.enqueue([JobSpec(problem=PROBLEM, target=A100.name, families=(FAMILY,))], queue_versions())
        with pytest.raises(MachineError, match="the disk is full"):
            list(compile_ahead.compile_ahead(queue, A100, 1, exit_when_empty=True))


def test_changed_files_are_not_used(postgres: str) -> None:
    with Queue(postgres) as queue:
        queue.enqueue([JobSpec(problem=PROBLEM, target=A100.name)], "v")
        assert queue.take_kernel(1, "0" * 32)
        assert not queue.take_kernel(1, "0" * 32)
        queue.store_files(1, "0" * 32, b"files")
        assert queue.new_files(1, set()) == {"0" * 32: b"files"}
        engine = create_engine(postgres)
        with engine.begin() as connection:
            connection.execute(text("UPDATE compiled SET files = 'other'"))
        engine.dispose()
        assert queue.new_files(1, set()) == {}


def test_list_of_files_names_those_of_this_machine(tmp_path: Path) -> None:
    listed = {"k.json": "/elsewhere/k.json", "k.cubin": "/elsewhere/k.cubin", "k.ttir": "/elsewhere/k.ttir"}
    members = {
        f"{FOLDER}/__grp__k.json": msgspec.json.encode(FileList(listed)),
        f"{FOLDER}/k.json": b"{}",
        f"{FOLDER}/k.cubin": b"code",
    }
    unpack_files(archive(**members), tmp_path)
    written = msgspec.json.decode((tmp_path / FOLDER / "__grp__k.json").read_bytes(), type=FileList)
    assert written.child_paths == {name: str(tmp_path / FOLDER / name) for name in ("k.json", "k.cubin")}
    assert (tmp_path / FOLDER / "k.cubin").read_bytes() == b"code"
    assert has_received(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        b"",
        b"PK\x03\x04 no archive",
        archive(**{f"../{FOLDER}/k.json": b"{}"}),
        archive(**{f"/{FOLDER}/k.json": b"{}"}),
        archive(**{f"{FOLDER}/../../k.json": b"{}"}),
        archive(**{f"{FOLDER}/k.so": b"code"}),
        archive(**{f"{FOLDER}/k.cubin": bytes(MAX_UNPACKED + 1)}),
        archive(**{f"{FOLDER}/__grp__k.json": b'{"child_paths": {"k.json": 1}}'}),
        archive(**{f"{FOLDER}/k{number}.json": b"{}" for number in range(65)}),
        archive(**{f"{FOLDER}/__grp__k.json": b'{"child_paths": {"\xff": ""}}'}),
        archive(**{f"{FOLDER}/k.json": b"{}" * 50}).replace(b"\xab\xae\xad", b"\xff\xff\xff", 1),
        archive(**{f"{FOLDER}/k.json": b"{}"})[:-30],
    ],
)
def test_hostile_files_are_refused(files: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    with pytest.raises(TableError):
        unpack_files(files, folder)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not has_received(folder)
