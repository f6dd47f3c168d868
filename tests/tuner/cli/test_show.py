from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from flashtune.db.store import open_store
from flashtune.record import Provenance, Record, Standing, Verdict
from flashtune.tuner.listing import best_sdpa_ms, standing, tflops

Run = Callable[..., Result]
Stored = tuple[Record, ...]


def test_nothing_stored_is_said_and_creates_nothing(run: Run, tmp_path: Path) -> None:
    result = run("show")
    assert result.exit_code == 0
    assert "run flashtune search first" in result.stderr
    assert run("show", "--json").stdout.strip() == "[]"
    assert not (tmp_path / "flashtune.sqlite").exists()


def test_selections_with_their_speed_and_standing(run: Run, stored: Stored) -> None:
    result = run("show")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "nvidia-h200" in line)
    assert stored[1].problem.key in line
    for cell in ("forward_q_outer", "0.5000", "1.20x", "measured", "timed"):
        assert cell in line


def test_json_has_everything(run: Run, stored: Stored) -> None:
    (row,) = json.loads(run("show", "--json").stdout)
    assert row["standing"] == "timed"
    assert row["best_sdpa_ms"] == 0.6
    assert row["tflops"] == pytest.approx(tflops(stored[1]))
    assert row["found"]["source"] == "database"
    assert row["found"]["record"]["config"]["block_m"] == 128


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("--target", "h200"), 1),
        (("--target", "nvidia-h100"), 0),
        (("--model", "phi-2"), 0),
    ],
)
def test_filters(run: Run, stored: Stored, arguments: tuple[str, ...], count: int) -> None:
    assert len(json.loads(run("show", "--json", *arguments).stdout)) == count


def test_filters_by_shape(run: Run, stored: Stored, shape: str) -> None:
    assert len(json.loads(run("show", "--json", "--shape", shape).stdout)) == 1


def test_an_unknown_target_is_a_usage_error(run: Run, stored: Stored) -> None:
    result = run("show", "--target", "h900")
    assert result.exit_code == 2
    assert "there is no target 'h900'" in result.stderr


def test_records_are_ranked_and_failures_say_why(run: Run, stored: Stored, shape: str) -> None:
    result = run("show", "--records", "--shape", shape)
    assert result.exit_code == 0, result.output
    assert "asks for too much SRAM" in result.stdout
    # What a record says is text: neither markup nor a terminal's control codes.
    assert "[tile]?[2J" in result.stdout
    rows = json.loads(run("show", "--records", "--shape", shape, "--json").stdout)
    assert [row["record"]["config"]["block_m"] for row in rows] == [128, 64, 32, 256, 16]


def test_long_lists_are_cut_and_say_so(run: Run, stored: Stored, shape: str) -> None:
    result = run("show", "--records", "--shape", shape, "--limit", "2")
    assert "3 more rows" in result.stderr
    assert "too much SRAM" not in result.stdout


def test_records_need_a_shape(run: Run, stored: Stored) -> None:
    assert run("show", "--records").exit_code == 2


def test_a_damaged_database_is_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flashtune.sqlite").write_bytes(
        b"this is no database, but long enough to be read as one" * 100
    )
    result = run("show")
    assert result.exit_code == 1
    assert result.stderr.startswith("flashtune: ")
    assert result.stderr.count("\n") == 1


def test_rows_that_cannot_be_read_are_one_sentence(
    run: Run, stored: Stored, shape: str, tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "flashtune.sqlite") as connection:
        connection.execute("UPDATE records SET payload = '{}' WHERE id = 3")
    result = run("show", "--records", "--shape", shape)
    assert result.exit_code == 0
    assert result.stderr.startswith("flashtune: ")
    assert result.stderr.count("\n") == 1
    assert "0.9000" not in result.stdout


def test_standing_follows_versions_and_verdict(stored: Stored) -> None:
    record = stored[1]
    assert standing(record) is Standing.TIMED
    other = msgspec.structs.replace(record.versions, triton="3.5.0")
    assert standing(msgspec.structs.replace(record, versions=other)) is Standing.UNPROVEN
    failed = Verdict(False, 3.0, 12, "tail", "NVIDIA H200")
    assert standing(msgspec.structs.replace(record, verdict=failed)) is Standing.UNPROVEN
    assert standing(msgspec.structs.replace(record, verdict=None)) is Standing.UNPROVEN
    assert standing(msgspec.structs.replace(record, provenance=Provenance.PREDICTED)) is not Standing.TIMED


def test_a_record_without_times_has_no_speed(stored: Stored) -> None:
    assert tflops(stored[3]) is None
    assert best_sdpa_ms(stored[3]) is None


def test_selections_of_a_gpu_outside_the_table(
    run: Run, make_record: Callable[..., Record], tmp_path: Path
) -> None:
    record = msgspec.structs.replace(make_record(), target="nvidia-a10")
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(record))
    assert len(json.loads(run("show", "--json", "--target", "nvidia-a10").stdout)) == 1
    assert "nvidia-a10" in run("show", "--target", "a11").stderr
