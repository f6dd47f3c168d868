"""Tests of searches on a PostgreSQL server that ends connections, restarts or stays away."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.core.notices import FlashtuneWarning
from flashtune.db import retries
from flashtune.db.store import Store, open_store
from tests.db.postgres import Server
from tests.db.records import make_record
from tests.tuner.search.fakes import FakeMeasurer, a_problem, by_tile
from tests.tuner.search.small_search import search

ROOT = Path(__file__).parents[3]


def disturb(server: Server, moments: int, is_over: threading.Event) -> None:
    """Ends all connections or the server itself, as a crash does, at random moments."""
    chance = random.Random(44)
    for moment in range(moments):
        time.sleep(chance.uniform(0, 0.2))
        if moment % 4:
            server.kill_backends("tuning")
        else:
            server.restart()
    is_over.set()


@pytest.mark.slow
def test_lost_connections_cost_no_result(
    own_postgres: Server, tmp_path: Path, fuzz_count: Callable[[int, int], int]
) -> None:
    url, is_over, heads = own_postgres.new_database("tuning"), threading.Event(), 0
    store = open_store(url)
    disturbing = threading.Thread(target=disturb, args=(own_postgres, fuzz_count(8, 200), is_over))
    disturbing.start()
    with open_store(str(tmp_path / "undisturbed.sqlite")) as undisturbed:
        while not is_over.is_set():
            heads += 4
            for each in (store, undisturbed):
                search(each, FakeMeasurer(by_tile), problem=a_problem(heads=heads))
        disturbing.join()
        contents = [[row.record for row in each.records()] for each in (store, undisturbed)]
        assert contents[0] == contents[1]
        chosen = [[row.record for row in each.selections()] for each in (store, undisturbed)]
        assert chosen[0] == chosen[1]
        assert len(chosen[0]) == heads // 4


@pytest.fixture
def gone(own_postgres: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a server that was stopped."""
    monkeypatch.setattr(retries, "QUIET_SECONDS", 0.1)
    store = open_store(own_postgres.new_database("tuning"))
    own_postgres.stop()
    return store


def test_server_that_stays_away_ends_the_search(gone: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_SECONDS", 1.0)
    with (
        pytest.warns(FlashtuneWarning, match="is not available; trying again for") as notes,
        pytest.raises(StoreError, match=r"cannot be used .*: check the server") as caught,
    ):
        search(gone, FakeMeasurer(by_tile))
    assert len(notes) == 1
    assert "s3cret" not in f"{caught.value} {notes[0].message}"


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_waits_of_other_threads_can_be_ended(gone: Store) -> None:
    threading.Timer(0.3, gone.retries.stop).start()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be used"):
            gone.add(make_record())
    assert time.monotonic() - start < 20


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_server_that_comes_back_is_used_again(gone: Store, own_postgres: Server) -> None:
    threading.Timer(0.5, own_postgres.start).start()
    assert gone.add(make_record()) == 1
    gone.close()


WAITING = """
import sys
from flashtune.db.store import open_store
from tests.tuner.search.fakes import FakeMeasurer, by_tile
from tests.tuner.search.small_search import search

def judge(candidate):
    print("measuring", flush=True)
    sys.stdin.readline()
    return by_tile(candidate)

with open_store(sys.argv[1]) as store:
    search(store, FakeMeasurer(judge))
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_at_once(own_postgres: Server) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, own_postgres.new_database("tuning")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    own_postgres.stop()
    process.stdin.write("\n" * 100)
    process.stdin.flush()
    time.sleep(1)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert "s3cret" not in errors
