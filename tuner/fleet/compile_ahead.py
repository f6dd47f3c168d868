"""Compiles kernels for the jobs of a queue on machines without their GPU.

The kernels that a search probably tries first are compiled, in the order of open jobs. Their files of
Triton's cache go to the workers through the database. A worker compiles a missing kernel itself.
"""

import contextlib
import functools
import io
import os
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path

import msgspec

from flashtune.core.errors import StoreError, TableError, UsageError
from flashtune.core.files import replace_file
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome
from flashtune.core.target import Target
from flashtune.db.queue import MAX_FILES_BYTES, Queue
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import COMPILE_SECONDS, compile_candidate
from flashtune.tuner.execution.processes import Workers
from flashtune.tuner.fleet.jobs import queue_versions, request_of
from flashtune.tuner.search.driver import likely_candidates, search_scope

# Kernels for one job: about as many as a search of the default effort compiles.
LIKELY = 96
POLL_SECONDS = 5.0
# A file of Triton's cache: the folder of one kernel, and the name of a file or of its list of files.
MEMBER = re.compile(r"[A-Za-z0-9_-]{16,80}/(__grp__)?[A-Za-z0-9_]{1,200}\.(json|ptx|cubin|amdgcn|hsaco)")
LIST = "__grp__"
MAX_UNPACKED = 8 * MAX_FILES_BYTES


class FileList(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's list of the files of one kernel, by name."""

    child_paths: dict[str, str]


def compile_ahead(
    queue: Queue, target: Target, width: int, *, exit_when_empty: bool = False
) -> Generator[tuple[int, int]]:
    """Compiles for the open jobs for a GPU, and yields the number of each job and of its kernels."""
    workers, free, seen = Workers(width), threading.Semaphore(width), set[int]()
    try:
        while True:
            new = [entry for entry in queue.open_specs(target.name, queue_versions()) if entry[0] not in seen]
            for job, spec in new:
                seen.add(job)
                try:
                    request = request_of(spec, target)
                except UsageError:
                    continue  # The worker that claims it gives the reason.
                scope, count = search_scope(request), 0
                for candidate in likely_candidates(request, queue, LIKELY):
                    family = find_family(candidate.family)
                    kernel = render(family, spec.problem, candidate.config, scope.specialization).digest
                    if not queue.take_kernel(job, kernel):
                        continue
                    free.acquire()
                    arguments = (spec.problem, candidate, scope.specialization, target)
                    done = workers.schedule(compiled_files, arguments, COMPILE_SECONDS)
                    done.add_done_callback(functools.partial(_store, queue, job, kernel))
                    done.add_done_callback(lambda _: free.release())
                    count += 1
                yield job, count
            if not new:
                if exit_when_empty:
                    break
                time.sleep(POLL_SECONDS)
        for _ in range(width):
            free.acquire()
    finally:
        workers.stop()


def _store(queue: Queue, job: int, kernel: str, done: Future[bytes]) -> None:
    """Stores the files of a kernel. After a failure, its worker compiles it and records the reason."""
    if not (done.cancelled() or done.exception()) and 0 < len(done.result()) <= MAX_FILES_BYTES:
        with contextlib.suppress(StoreError):
            queue.store_files(job, kernel, done.result())


def compiled_files(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> bytes:
    """Compiles a candidate in this process, and returns its files of Triton's cache; nothing if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        if compile_candidate(problem, candidate, specialization, target).outcome is not Outcome.OK:
            return b""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).glob("*/*")):
                name = path.relative_to(folder).as_posix()
                if MEMBER.fullmatch(name):
                    archive.write(path, name)
        return packed.getvalue()


def add_files(files: bytes, folder: Path) -> None:
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
