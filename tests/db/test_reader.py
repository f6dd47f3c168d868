import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashtune.db.light.reader import open_reader
from flashtune.db.store import Store, open_store
from tests.db.records import make_problem, make_record, reader_of

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
