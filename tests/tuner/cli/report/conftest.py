"""A database with a search, and a report of the shipped tables."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from flashtune.core.record import Outcome, PeerTime, Record, Resources
from flashtune.db.store import open_store
from flashtune.tuner.cli import main
from tests.tuner.cli.conftest import Run

# Markup in the free texts of stored records.
HOSTILE = "<img src=x onerror=alert(1)>"
CONFIGS = [f"block_m={rows},block_n={columns}" for rows in (32, 64, 128) for columns in (16, 32, 64)]


@pytest.fixture
def running(run: Run, make_record: Callable[..., Record], tmp_path: Path) -> tuple[Record, ...]:
    """Nine timed candidates, one that does not fit, and a wrong one; nothing is selected yet."""
    records = [make_record(config, ms=0.9 - 0.02 * at) for at, config in enumerate(CONFIGS)]
    time = records[-1].measurement
    assert time is not None
    time = msgspec.structs.replace(time, peers=(*time.peers, PeerTime(HOSTILE, 0.8)))
    records[-1] = msgspec.structs.replace(records[-1], measurement=time)
    large = Resources(sram_bytes=300_000)
    records += [
        msgspec.structs.replace(
            make_record("block_m=256", ms=None, outcome=Outcome.INFEASIBLE), resources=large
        ),
        make_record("block_m=16", ms=None, outcome=Outcome.WRONG_RESULT, message=HOSTILE),
    ]
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        for record in records:
            store.add(record)
    return tuple(records)


@pytest.fixture
def searched(running: tuple[Record, ...], tmp_path: Path) -> tuple[Record, ...]:
    """The same records, of which the fastest is selected."""
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(running[len(CONFIGS) - 1]))
    return running


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the shipped tables."""
    folder = tmp_path_factory.mktemp("shipped") / "report"
    database = str(folder.with_name("empty.sqlite"))
    result = CliRunner().invoke(main, ["report", "--shipped", "--out", str(folder), "--db", database])
    assert result.exit_code == 0, result.output
    return folder
