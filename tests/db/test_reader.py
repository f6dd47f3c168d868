"""Tests of reading a database, and of storing self-checks, without SQLAlchemy."""

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import StoreError
from flashtune.core.record import Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.light import self_checks
from flashtune.db.light.bootstrap import check_tables
from flashtune.db.light.reader import open_reader
from flashtune.db.light.self_checks import remember_check
from flashtune.db.store import Store, open_store
from tests.db.records import make_problem, make_record, passed_check, reader_of

TARGET = "nvidia-h200"


def test_missing_database_has_no_reader(path: Path) -> None:
    assert open_reader(str(path)) is None
    assert not path.exists()


def test_reader_finds_selections_of_the_store(store: Store) -> None:
    short, long = make_record(), make_record(problem=make_problem(seqlen_q=1024))
    for record in (long, short, make_record(target="nvidia-a100")):
        store.pin(store.add(record))
    reader = reader_of(store.url)
    assert reader.selection(short.problem.key, TARGET) == short
    assert reader.selection(make_problem(batch=7).key, TARGET) is None
    assert reader.selection(short.problem.key, "amd-mi300x") is None
    assert reader.selections(TARGET) == tuple(sorted((short, long), key=lambda record: record.problem.key))
    assert reader.selections("amd-mi300x") == ()
    assert reader.stored() == (*store.selections(), *store.fallbacks())


def test_environment_variable_sets_the_database(own_database: Path) -> None:
    with open_store() as store:
        store.pin(store.add(make_record()))
    reader = open_reader()
    assert reader is not None
    assert reader.selections(TARGET) == (make_record(),)


def test_reader_notices_a_replaced_or_removed_database(path: Path) -> None:
    for ms in (1.0, 2.0):
        with open_store(str(path)) as store:
            store.pin(store.add(make_record(ms=ms)))
        reader = reader_of(path)
        assert reader.selections(TARGET) == (make_record(ms=ms),)
        path.unlink()
        assert reader.selections(TARGET) == ()


def test_reader_does_not_write(path: Path) -> None:
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    before = path.read_bytes()
    reader = reader_of(path)
    reader.selections(TARGET)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_threads_read_while_a_store_writes(path: Path) -> None:
    failures: list[BaseException] = []
    done = threading.Event()
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
        reader = reader_of(path)

        def read() -> None:
            try:
                while not done.is_set():
                    assert len(reader.selections(TARGET)) == 1
            except BaseException as error:  # noqa: BLE001 - a thread's failure is told by the test
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(50):
            store.pin(store.add(make_record(ms=2.0 + number)))
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_can_read(path: Path) -> None:
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    script = (
        "import os\n"
        "from flashtune.db.light.reader import open_reader\n"
        f"reader = open_reader({str(path)!r})\n"
        f"assert len(reader.selections({TARGET!r})) == 1\n"
        "child = os.fork()\n"
        f"assert len(reader.selections({TARGET!r})) == 1\n"
        "if child:\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=1200)


def test_reader_imports_no_heavy_modules(path: Path) -> None:
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    script = (
        "import sys\n"
        "from flashtune.db.light.reader import open_reader\n"
        "from flashtune.db.table import shipped_table\n"
        f"assert len(open_reader({str(path)!r}).selections({TARGET!r})) == 1\n"
        f"shipped_table({TARGET!r})\n"
        "from flashtune.tuner.tables.lookup import database_selections\n"
        f"assert len(database_selections({str(path)!r})) == 1\n"
        "heavy = {'sqlalchemy', 'alembic', 'optuna', 'jinja2', 'mako', 'filelock', 'click', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=1200)


VERSIONS = Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
SCHEMAS = sorted((Path(__file__).parents[1] / "data" / "schemas").glob("*.sqlite"))


def make_check(digest: str = "a" * 32, *, passed: bool = True, seconds: float | None = 0.1) -> Check:
    verdict = Verdict(passed, 0.5, 9, "" if passed else "needle", "NVIDIA H200")
    return Check(digest=digest, target=TARGET, versions=VERSIONS, verdict=verdict, seconds=seconds)


def test_store_opens_a_database_created_by_a_check(path: Path) -> None:
    check = make_check()
    remember_check(check, str(path))
    reader = reader_of(path)
    assert passed_check(reader, check.digest, TARGET, VERSIONS) is True
    assert reader.remembered(check.digest, TARGET, VERSIONS) == check
    assert reader.remembered("b" * 32, TARGET, VERSIONS) is None
    with open_store(str(path)) as store:
        store.remember_check(make_check(passed=False, seconds=None))
    assert passed_check(reader, check.digest, TARGET, VERSIONS) is False
    remember_check(check, str(path))
    assert passed_check(reader, check.digest, TARGET, VERSIONS) is True


def test_concurrent_creation_loses_no_checks(path: Path) -> None:
    digests = [f"{number:032x}" for number in range(8)]
    failures: list[StoreError] = []

    def work(digest: str) -> None:
        try:
            remember_check(make_check(digest), str(path))
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    reader = reader_of(path)
    assert all(passed_check(reader, digest, TARGET, VERSIONS) for digest in digests)


def test_tables_cannot_change_between_their_check_and_the_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_check(make_check(), str(path))
    refusals: list[str] = []

    def checked(execute: Callable[[str], Any], where: str) -> bool:
        has_tables = check_tables(execute, where)
        with closing(sqlite3.connect(path, timeout=0)) as other:
            try:
                other.execute("CREATE TABLE t (x)")
            except sqlite3.OperationalError as error:
                refusals.append(str(error))
        return has_tables

    monkeypatch.setattr(self_checks, "check_tables", checked)
    remember_check(make_check("b" * 32), str(path))
    assert refusals == ["database is locked"]


def test_a_check_counts_under_versions_that_run_the_kernel_alike(path: Path) -> None:
    stored = msgspec.structs.replace(VERSIONS, driver="580.159.04", torch="2.11", flashtune="0.1")
    remember_check(msgspec.structs.replace(make_check(), versions=stored), str(path))
    reader = reader_of(path)
    for change, expected in (
        ({"driver": "580.200", "torch": "2.13", "flashtune": "0.2"}, True),
        ({"driver": "590.10"}, None),
        ({"triton": "99.0"}, None),
        ({"template": "f" * 32}, None),
    ):
        here = msgspec.structs.replace(stored, **change)
        assert passed_check(reader, "a" * 32, TARGET, here) is expected, change
