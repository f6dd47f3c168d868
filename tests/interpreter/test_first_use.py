"""Tests of concurrent processes without a database and without compiled kernels."""

import multiprocessing
import sqlite3
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.interpreter.first_use import use_first

PROCESSES = 8
ROOT = Path(__file__).parents[2]


def test_concurrent_first_uses_are_correct_and_check_once(
    own_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT)  # processes find the tests where this one does
    checks = tmp_path / "checks"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.interpreter.first_use", "flashtune.db.light.self_checks"])
    start = time.time() + 4.0
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        jobs = [pool.submit(use_first, start, checks) for _ in range(PROCESSES)]
        errors = [job.result(timeout=1200) for job in jobs]
    assert max(errors) < 1e-5
    # Whoever comes after the first one takes its verdict.
    assert checks.stat().st_size == 1
    with closing(sqlite3.connect(own_database)) as connection:
        assert connection.execute("SELECT count(*), min(passed) FROM checks").fetchone() == (1, 1)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
