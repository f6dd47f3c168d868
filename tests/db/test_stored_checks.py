"""Tests of storing self-checks without SQLAlchemy, and of the databases created for them."""

import sqlite3
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
from flashtune.db.light.self_checks import remember_check
from flashtune.db.store import open_store
from tests.db.records import reader_of

TARGET = "nvidia-h200"
VERSIONS = Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
SCHEMAS = sorted((Path(__file__).parents[1] / "data" / "schemas").glob("*.sqlite"))


def make_check(digest: str = "a" * 32, *, passed: bool = True, seconds: float | None = 0.1) -> Check:
    verdict = Verdict(passed, 0.5, 9, "" if passed else "needle", "NVIDIA H200")
    return Check(digest=digest, target=TARGET, versions=VERSIONS, verdict=verdict, seconds=seconds)


def test_store_opens_a_database_created_by_a_check(path: Path) -> None:
    check = make_check()
    remember_check(check, str(path))
    reader = reader_of(path)
    assert reader.check(check.digest, TARGET, VERSIONS) is True
    assert reader.remembered(check.digest, TARGET, VERSIONS) == check
    assert reader.remembered("b" * 32, TARGET, VERSIONS) is None
    with open_store(str(path)) as store:
        store.remember_check(make_check(passed=False, seconds=None))
    assert reader.check(check.digest, TARGET, VERSIONS) is False
    remember_check(check, str(path))
    assert reader.check(check.digest, TARGET, VERSIONS) is True


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
    assert all(reader.check(digest, TARGET, VERSIONS) for digest in digests)


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
        assert reader.check("a" * 32, TARGET, msgspec.structs.replace(stored, **change)) is expected, change
