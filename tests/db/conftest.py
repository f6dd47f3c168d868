"""Fixtures: records, and the databases of the store's contract tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.config import Config
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Measurement, Outcome, Provenance, Record, Resources, Verdict, Versions
from flashtune.core.target import find_target
from flashtune.db.store import Store, open_store
from flashtune.templates.registry import find_family

FAMILY = "forward_q_outer"
TARGET = "nvidia-h200"
VERSIONS = Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1")

# A server for the contract tests, such as postgresql+psycopg://user@host/name; emptied by them.
SERVER_VARIABLE = "FLASHTUNE_TEST_SERVER"


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    """A small problem, with fields replaced."""

    def make(**changes: Any) -> Problem:
        plain = Problem(
            dtype=Dtype.BF16,
            head_dim=64,
            value_head_dim=64,
            heads=8,
            kv_heads=4,
            batch=2,
            seqlen_q=512,
            seqlen_kv=512,
        )
        return msgspec.structs.replace(plain, **changes)

    return make


@pytest.fixture(scope="session")
def make_record(make_problem: Callable[..., Problem]) -> Callable[..., Record]:
    """A measured, verified record; `ms` and any field may be given."""

    def make(ms: float = 1.0, **changes: Any) -> Record:
        problem = changes.pop("problem", make_problem())
        config: Config = find_family(FAMILY).default(problem, find_target(TARGET))
        plain = Record(
            problem=problem,
            target=TARGET,
            family=FAMILY,
            config=config,
            specialization=Specialization(),
            kernel="0123456789abcdef" * 2,
            outcome=Outcome.OK,
            provenance=Provenance.MEASURED,
            versions=VERSIONS,
            resources=Resources(sram_bytes=49152, registers=168, compile_seconds=1.5),
            verdict=Verdict(passed=True, worst_ratio=0.5, checks=12, failed="", device="NVIDIA H200"),
            measurement=Measurement(ms=ms, p20=ms, p80=ms, samples=11),
        )
        return msgspec.structs.replace(plain, **changes)

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a new database."""
    return tmp_path / "records.sqlite"


@pytest.fixture
def filled(path: Path, make_record: Callable[..., Record]) -> Path:
    """A database with one selection."""
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    return path


@pytest.fixture(params=["sqlite", *(["server"] if SERVER_VARIABLE in os.environ else [])])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """An empty store of each available engine."""
    url = str(path)
    if request.param == "server":
        url = os.environ[SERVER_VARIABLE]
        _empty(url)
    with open_store(url) as opened:
        yield opened


def _empty(url: str) -> None:
    from sqlalchemy import create_engine, text

    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
