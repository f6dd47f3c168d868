"""Tests of the machine code that a search stores next to its database."""

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from flashtune.bundle.bundle_file import open_bundle
from flashtune.core import VERSION
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.target import find_target
from flashtune.db.location import bundle_file, database_url
from flashtune.db.store import Store
from flashtune.launch.bundles import Bundles, recipe_of
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.evaluation import MachineCode
from tests.bundle.conftest import make_entry
from tests.tuner.search.fakes import KERNEL, FakeMeasurer, a_problem, by_tile
from tests.tuner.search.small_search import H100, search


class Coded(FakeMeasurer):
    """Has machine code of each candidate."""

    def __init__(self, kernel: str = KERNEL) -> None:
        super().__init__(by_tile)
        self.kernel = kernel
        self.coded: list[Candidate] = []

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        self.coded.append(candidate)
        entry, codes = make_entry(len(self.coded), b"code")
        self.codes[candidate] = ((msgspec.structs.replace(entry, kernel=self.kernel), codes),)
        return super().machine_code(scope, candidate)


def test_next_process_finds_the_winner_with_the_verdict_of_the_search(store: Store) -> None:
    result = search(store, Coded())
    record = result.best
    assert record is not None
    path = bundle_file(store.url, H100.arch)
    bundles = Bundles(of_database=lambda arch: bundle_file(store.url, arch))
    located = bundles.find(record, record.specialization, H100)
    assert located is not None
    entry = located.entry
    receipts = [(receipt.machine, receipt.verdict) for receipt in entry.receipts]
    assert receipts == [(entry.machine, record.verdict)]
    assert bundles.find(record, record.specialization, find_target("h200")) is None
    # Another problem's search adds its winner, and keeps this one.
    search(store, Coded(), problem=a_problem(head_dim=128, value_head_dim=128))
    index = open_bundle(path, own=True).index
    records = [row.record for row in store.selections()]
    assert len(records) == 2
    assert index.recipes == {recipe_of(record, record.specialization): KERNEL for record in records}
    assert index.flashtune == VERSION


def test_code_of_another_kernel_is_not_stored(store: Store) -> None:
    measurer = Coded("f" * 32)
    search(store, measurer)
    assert measurer.coded
    assert not bundle_file(store.url, H100.arch).exists()


def test_unwritable_file_is_a_warning(store: Store) -> None:
    bundle_file(store.url, H100.arch).mkdir()
    with pytest.warns(FlashtuneWarning, match="cannot be stored"):
        assert search(store, Coded()).best is not None


def test_bundle_of_a_server_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path))
    assert bundle_file("postgresql://host/name", "sm_90") == tmp_path / "server.sm_90.bundle"
    assert bundle_file(database_url("/a/b.sqlite"), "sm_90") == Path("/a/b.sqlite.sm_90.bundle")
