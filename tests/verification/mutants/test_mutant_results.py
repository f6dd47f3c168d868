"""Tests of saving, counting and showing mutant runs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import FlashtuneError
from tests.mutants import results
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.results import Control, Fate, Run

MUTANTS = gpu_mutants()
REFUSED = "random q=1 kv=2 heads=1x1: row errors 9 of 1 allowed"


def a_run(**changes: Any) -> Run:
    outcomes = tuple(
        results.found_of(mutant, fate, REFUSED, 1.5)
        for mutant, fate in zip(MUTANTS, (Fate.REFUSED, Fate.HUNG, Fate.SURVIVED), strict=False)
    )
    run = Run("NVIDIA H200", "2.11", "3.6", "full", 7, 90.0, (Control("a", True, worst_ratio=0.7),), outcomes)
    return msgspec.structs.replace(run, **changes)


def damage(data: bytes) -> bytes:
    """A file with another byte behind what a header would be."""
    return data[:10] + b"\xff" + data[11:]


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_runs_round_trip(name: str, tmp_path: Path) -> None:
    run = a_run()
    results.save(run, tmp_path / name)
    assert results.load(tmp_path / name) == run
    for damaged in (b"{}", damage((tmp_path / name).read_bytes())):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(FlashtuneError, match=name):
            results.load(tmp_path / name)
    with pytest.raises(FlashtuneError, match="nowhere"):
        results.load(tmp_path / "nowhere.json")


def test_summaries_have_counts() -> None:
    assert results.summary(a_run()).startswith("3 mutants: 1 refused, 1 hung, 1 survived.")
    lines = results.tally(a_run().found).splitlines()
    assert lines[1].split() == ["forward_q_outer", "1", "1", "1"]
    assert lines[2] == "refused first by: random 1"
    controls = (Control("a", True), Control("b", False, confirmed=True), Control("c", False, confirmed=False))
    words = results.summary(a_run(found=(), controls=controls))
    assert words.startswith("3 right kernels: 2 refused, 1 of them wrongly.")
