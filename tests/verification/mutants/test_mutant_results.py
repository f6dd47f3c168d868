"""Tests of saving, counting and showing mutant runs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import FlashtuneError
from tests.mutants import pages, results
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


@pytest.fixture(autouse=True)
def few_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders only the mutants of the runs. Another test renders all."""
    monkeypatch.setattr(pages, "_catalogue", lambda device: MUTANTS[:3])


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


def shown(runs: list[Run]) -> str:
    return "\n".join(pages.texts(runs).values())


@pytest.mark.slow
def test_pages_count_detected_mutants_and_name_the_others() -> None:
    filled = shown([a_run(), a_run(found=())])
    assert "| family | mutants | NVIDIA H200 | emulator |" in filled
    assert "| `forward_q_outer` | 39 | 2 of 3 |  |" in filled
    assert "- Refused: 1. Hung or died: 1.\n" in filled
    assert f"| `forward_q_outer` | {MUTANTS[2].name} | survived |" in filled
    assert "delays" not in filled
    refused, *others = a_run().found
    late = msgspec.structs.replace(refused, fate=results.Fate.DELAYED, racy=True)
    not_run = msgspec.structs.replace(refused, name="not run", fate=results.Fate.NOT_RUN)
    told = shown([a_run(found=(late, not_run, *others))])
    assert "| `forward_q_outer` | 39 | 1 of 3 |  |" in told
    assert f"| `forward_q_outer` | {MUTANTS[0].name} (race) | detected with delays only |" in told
    assert "- Not compiled: 0. Not run: 1.\n" in told
    assert "1 sampled\nconfigs were verified: 0 were refused" in filled
    assert "- Unmodified kernels that were accepted: 1 of 1.\n" in filled
    assert "- Mutants that still render to the source that was run: 3 of 3." in filled


@pytest.mark.slow
def test_pages_name_refused_kernels_and_kernels_that_changed_since() -> None:
    changed = msgspec.structs.replace(a_run().found[0], kernel="0" * 32)
    judged = (("d40", False), ("d64", True), ("d96", None))
    controls = tuple(Control(label, False, "died", confirmed=confirmed) for label, confirmed in judged)
    filled = shown([a_run(found=(changed, a_run().found[1])), a_run(found=(), controls=controls)])
    assert "- Mutants that still render to the source that was run: 1 of 2." in filled
    assert "- Refused, by the strict level too: d40. died\n" in filled
    assert "- Refused, and the strict level accepts it: d64. died\n" in filled
    assert "- Refused, and not judged again: d96. died" in filled
    assert "3 were refused, 2 of them wrongly" in filled
