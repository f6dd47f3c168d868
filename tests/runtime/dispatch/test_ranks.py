"""Tests of the comparison of ranks, in processes that gloo connects."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

import flashtune
from flashtune.db.store import open_store
from tests.support.records import PROBLEM, make_record

RANKS = 3


def outcomes(rank: int, start: str, database: str) -> list[str]:
    """The errors of a rank: for a GPU with equal tables, one with different tables, and a missing GPU."""
    os.environ["FLASHTUNE_DB"] = database
    dist.init_process_group("gloo", init_method=start, rank=rank, world_size=RANKS)
    errors = []
    for target in ("nvidia-h200", "nvidia-h100", None):
        try:
            flashtune.check_ranks(target_name=target)
            errors.append("")
        except flashtune.MachineError as error:
            errors.append(str(error))
    pair = dist.new_group([1, 2])
    if rank:
        flashtune.check_ranks(pair, "nvidia-h100")
    dist.destroy_process_group()
    return errors


@pytest.mark.slow
def test_ranks_that_differ_are_named_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    databases = [str(tmp_path / name) for name in ("other", "same", "same")]
    with open_store(databases[0]) as store:
        record = msgspec.structs.replace(make_record(PROBLEM), target="nvidia-h100")
        store.pin(store.add(record))
    start = f"file://{tmp_path}/start"
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as processes:
        first, *others = processes.map(outcomes, range(RANKS), [start] * RANKS, databases)
    assert others == [first] * (RANKS - 1)
    equal, different, missing = first
    assert equal == ""
    assert "rank 0 would select other kernels than rank 1 (different: tables or bundles): give" in different
    assert missing.startswith("rank 0 cannot select kernels: no GPU is visible here")


def test_comparison_needs_a_process_group() -> None:
    with pytest.raises(flashtune.UsageError, match="there is no process group"):
        flashtune.check_ranks()
