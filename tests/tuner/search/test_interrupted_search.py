"""Tests of `kill -9` and Ctrl-C during a search: finished results are stored, and the search resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashtune.core.record import Outcome, Provenance
from flashtune.db.store import open_store
from tests.tuner.search.predicted_search import SIZE

PROGRAM = Path(__file__).with_name("predicted_search.py")
WAIT_SECONDS = 600.0


def start(database: Path, caches: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches)}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(database)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )


def stored(database: Path) -> int:
    if not database.exists():
        return 0
    with open_store(str(database)) as store:
        return len(store.records())


def members(session: int) -> list[int]:
    """The processes of a session that still run."""
    processes = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            processes.append(int(folder.name))
    return processes


def wait_for_records(process: subprocess.Popen[str], database: Path, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while stored(database) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_selects_the_best_so_far_and_kills_no_compiler(tmp_path: Path) -> None:
    database = tmp_path / "interrupted.sqlite"
    process = start(database, tmp_path / "triton")
    wait_for_records(process, database, 1)
    # As a terminal does: to every process of the foreground group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode != 0
    assert output == ""
    with open_store(str(database)) as store:
        assert {entry.record.outcome for entry in store.records()} == {Outcome.OK}
        assert len(store.selections()) == 1


@pytest.mark.slow
def test_killed_search_resumes(tmp_path: Path) -> None:
    database = tmp_path / "killed.sqlite"
    process = start(database, tmp_path / "triton")
    wait_for_records(process, database, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()

    with open_store(str(database)) as store:
        finished = store.records()
    assert 2 <= len(finished) < SIZE
    assert all(entry.record.provenance is Provenance.PREDICTED for entry in finished)
    assert all(entry.record.outcome is Outcome.OK for entry in finished)

    again = start(database, tmp_path / "triton")
    output, _ = again.communicate(timeout=WAIT_SECONDS)
    assert again.returncode == 0
    reused, tried, pinned = output.split()
    assert int(reused) == len(finished)
    assert int(tried) == SIZE
    assert pinned == "True"
    # The dead search's workers did not outlive it.
    deadline = time.monotonic() + WAIT_SECONDS
    while members(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
