"""A search's machine code serves the first call of the next process."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import flashtune
from flashtune import testing
from flashtune.core.target import find_target
from flashtune.db.location import database_bundle
from flashtune.db.store import open_store
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.bundles import Bundles
from flashtune.launch.kernel_cache import kernel_of
from flashtune.runtime import kernel_loader
from flashtune.runtime.session import SESSION
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.evaluation import MachineCode
from flashtune.tuner.search.machine_code import store_machine_code
from tests.support.emulated_gpu import CpuDriver, emulated_gpu
from tests.support.records import make_record
from tests.tuner.search.fakes import FakeCompiler, FakeMeasurer, done, right

H200 = find_target("h200")
PROBLEM = testing.problem("heads=4,seqlen=320,head_dim=64,dtype=bf16,causal")


@pytest.mark.slow
def test_first_call_of_the_next_process_loads_the_code_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "records.sqlite"))
    record = make_record(PROBLEM, specialization=contiguous_specialization(PROBLEM))
    kernel = kernel_of(record, record.specialization)
    made = entry_of(kernel, PROBLEM, compile_binary(kernel, H200), "12.8")

    class Measurer(FakeMeasurer):
        def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
            return done((made,))

    with open_store() as store:
        store.pin(store.add(record))
        tools = SearchWorkers(FakeCompiler(), Measurer(lambda candidate: right(1.0)))
        scope = SearchTask(PROBLEM, H200, record.specialization, ())
        store_machine_code(scope, store.selections(), tools, store)
    monkeypatch.setattr(kernel_loader, "kernel_of", None)
    with emulated_gpu() as library:
        monkeypatch.setattr(SESSION.platform, "bundles", Bundles(CpuDriver(library), database_bundle))
        monkeypatch.setattr(SESSION.loader, "bundles", SESSION.platform.bundles)
        q, k, v = (torch.zeros(1, 320, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv")
        flashtune.attention(q, k, v, causal=True, prefer="generated")
    assert [launched.function for launched in library.launches] == [kernel.entry]
