"""A database with a few records, and a way to call the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner, Result

from flashtune.core.problem import Problem
from flashtune.core.record import Outcome, Record, Resources
from flashtune.db.store import open_store
from flashtune.tuner.cli import main
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support import records
from tests.support.records import VERDICT, MakeRecord

SHAPE = "heads=8,kv_heads=2,seqlen=1024,head_dim=64,dtype=bf16,causal,batch=2"

PEERS = {"sdpa-cudnn": 0.6, "sdpa-flash": 0.9}
RESOURCES = Resources(sram_bytes=49_152, registers=128)
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `flashtune` with arguments, on a database and a cache of the test's own."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "flashtune.sqlite"))
    # Sentences are folded at words, and tests compare them whole.
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))

    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="flashtune")

    return invoke


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> mock.Mock:
    """A compiler that answers at once, and caches of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    fake = mock.Mock(return_value=Resources(sram_bytes=50_000, registers=128, spill_bytes=8))
    for module in ("binary.resources", "analysis.explain"):
        monkeypatch.setattr(f"flashtune.tuner.{module}.read_resources", fake)
    return fake


@pytest.fixture
def shape() -> str:
    """The shape of the stored records, as a user writes it."""
    return SHAPE


@pytest.fixture
def problem() -> Problem:
    """The problem that the stored records compute."""
    (parsed,) = parse_shape(SHAPE)
    return parsed


@pytest.fixture
def make_record(problem: Problem) -> MakeRecord:
    """Builds a record like one of a search on an H200."""

    def build(config: str = "", ms: float | None = 0.5, of: Problem = problem, **changes: Any) -> Record:
        if changes.get("outcome", Outcome.OK) is not Outcome.OK:
            changes["verdict"] = msgspec.structs.replace(VERDICT, passed=False)
        return records.make_record(of, ms, config=config, peers=PEERS, resources=RESOURCES, **changes)

    return build


@pytest.fixture
def stored(run: Run, make_record: MakeRecord, tmp_path: Path) -> tuple[Record, ...]:
    """Three good records, two failures, the fastest selected."""
    records = (
        make_record("block_m=64", ms=0.7),
        make_record("block_m=128", ms=0.5),
        make_record("block_m=32", ms=0.9),
        make_record("block_m=256", ms=None, outcome=Outcome.INFEASIBLE, message="asks for too much SRAM"),
        make_record(
            "block_m=16", ms=None, outcome=Outcome.WRONG_RESULT, message="tail of the last [tile]\x1b[2J"
        ),
    )
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        ids = [store.add(record) for record in records]
        store.pin(ids[1])
    return records


@pytest.fixture
def two_gpus(run: Run, make_record: MakeRecord, problem: Problem, tmp_path: Path) -> tuple[Record, ...]:
    """Selections of two lengths on an H200, with one kernel, and of one on an H100."""
    longer = msgspec.structs.replace(problem, seqlen_q=2048, seqlen_kv=2048)
    records = (make_record(), make_record(of=longer, ms=1.5), make_record("block_n=32", target="nvidia-h100"))
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        for record in records:
            store.pin(store.add(record))
    return records
