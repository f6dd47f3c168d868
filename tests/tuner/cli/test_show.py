import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import triton

from flashtune.core.machine import torch_version, triton_version
from flashtune.core.record import Provenance, Record, Verdict, VerificationStatus
from flashtune.db.store import open_store
from flashtune.tuner.tables.listing import best_sdpa_ms, standing, tflops
from flashtune.tuner.tables.lookup import shipped_selections
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.short_shape import short_shape
from tests.tuner.cli.conftest import SHAPE, Run

Stored = tuple[Record, ...]


def test_empty_database_is_reported_and_not_created(run: Run, tmp_path: Path) -> None:
    result = run("show")
    assert result.exit_code == 0
    assert "run flashtune search first" in result.stderr
    assert run("show", "--json").stdout.strip() == "[]"
    assert not (tmp_path / "flashtune.sqlite").exists()


def test_database_in_creation_reads_as_empty(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flashtune.sqlite").touch()
    for arguments in (("show",), ("show", "--records", "--shape", "heads=1,seqlen=64,head_dim=64")):
        result = run(*arguments)
        assert "older schema" not in result.stderr
        assert result.exit_code == 0, result.stderr


def test_selection_is_one_short_line(run: Run, stored: Stored) -> None:
    result = run("show")
    assert result.exit_code == 0, result.output
    target, *_, line = result.stdout.splitlines()
    assert target == "nvidia-h200"
    assert line.split() == ["h8/2", "d64", "s1024", "b2", "causal", "0.5000", "4", "1.20", "timed"]


def test_wide_output_includes_key_and_config(run: Run, stored: Stored) -> None:
    result = run("show", "--wide")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "nvidia-h200" in line)
    for cell in (stored[1].problem.key, "forward_q_outer", "default", "1.20x", "measured"):
        assert cell in line


def test_predicted_times_are_marked(run: Run, make_record: Callable[..., Record], tmp_path: Path) -> None:
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(make_record(provenance=Provenance.PREDICTED)))
    assert " ~0.5000 " in run("show").stdout


def test_short_shapes_of_different_problems_differ() -> None:
    problems = {entry.record.problem for entry in shipped_selections()}
    assert len({short_shape(problem) for problem in problems}) == len(problems)


@pytest.mark.parametrize(
    ("shape", "short"),
    [
        ("heads=32,kv_heads=8,head_dim=128,seqlen=4096,causal", "h32/8 d128 s4096 b1 causal"),
        ("heads=8,head_dim=64,seqlen_q=1,seqlen_kv=512,dtype=fp16", "h8 d64 q1 k512 b1 fp16"),
        ("heads=8,head_dim=64,seqlen=512,causal=top_left,backward", "h8 d64 s512 b1 top-left bwd"),
        ("heads=8,head_dim=64,seqlen=512,window=63:5", "h8 d64 s512 b1 w63:5"),
    ],
)
def test_short_shapes_omit_defaults(shape: str, short: str) -> None:
    (problem,) = parse_shape(shape)
    assert short_shape(problem) == short


def test_show_imports_no_torch(stored: Stored, tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from click.testing import CliRunner\n"
        "from flashtune.tuner.cli import main\n"
        "result = CliRunner().invoke(main, ['show'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'h8/2' in result.stdout, result.output\n"
        "slow = 'torch', 'numpy', 'sqlalchemy', 'alembic', 'jinja2', 'optuna', "
        "'flashtune.tuner.workloads.models'\n"
        "print([name for name in slow if name in sys.modules])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, seconds = done.stdout.splitlines()
    assert imported == "[]"
    # 0.6 s of CPU on an idle machine; torch alone would take 1.5 s more.
    assert float(seconds) < 1.6


def test_show_does_not_import_triton_for_other_versions(
    run: Run, make_record: Callable[..., Record], tmp_path: Path
) -> None:
    record = make_record()
    other = msgspec.structs.replace(record.versions, triton="3.5.0")
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(msgspec.structs.replace(record, versions=other)))
    code = (
        "import sys\n"
        "from flashtune.tuner.cli import main\n"
        "main(['show'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'triton', 'sqlalchemy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, line, imported = done.stdout.splitlines()
    assert line.endswith("unproven")
    assert imported == "[]"


def test_versions_are_the_same_without_imports() -> None:
    code = (
        "import sys\n"
        "from flashtune.core.machine import torch_version, triton_version\n"
        "print(torch_version(), triton_version(), *{'torch', 'triton'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.split() == [torch_version(), triton_version()] == [torch.__version__, triton.__version__]
    )


def test_json_contains_the_full_record(run: Run, stored: Stored) -> None:
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
        (("--shape", SHAPE), 1),
    ],
)
def test_filters(run: Run, stored: Stored, arguments: tuple[str, ...], count: int) -> None:
    assert len(json.loads(run("show", "--json", *arguments).stdout)) == count


def test_every_shipped_selection_is_a_row(run: Run) -> None:
    lines = run("show", "--shipped", "--limit", "10000").stdout.splitlines()
    rows = [line for line in lines if line.rstrip().endswith(tuple(VerificationStatus))]
    assert len(rows) == len(json.loads(run("show", "--shipped", "--json").stdout))


def test_records_are_ranked_and_failures_have_reasons(run: Run, stored: Stored, shape: str) -> None:
    result = run("show", "--records", "--shape", shape)
    assert result.exit_code == 0, result.output
    assert "asks for too much SRAM" in result.stdout
    # Texts of a record are printed without markup and without a terminal's control codes.
    assert "[tile]?[2J" in result.stdout
    rows = json.loads(run("show", "--records", "--shape", shape, "--json").stdout)
    assert [row["record"]["config"]["block_m"] for row in rows] == [128, 64, 32, 256, 16]


def test_long_lists_are_truncated_with_a_note(run: Run, stored: Stored, shape: str) -> None:
    result = run("show", "--records", "--shape", shape, "--limit", "2")
    assert "3 more rows" in result.stderr
    assert "too much SRAM" not in result.stdout


def test_damaged_database_is_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flashtune.sqlite").write_bytes(
        b"this is no database, but long enough to be read as one" * 100
    )
    result = run("show")
    assert result.exit_code == 1
    assert result.stderr.startswith("flashtune: ")
    assert result.stderr.count("\n") == 1


def test_unreadable_rows_are_one_sentence(run: Run, stored: Stored, shape: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "flashtune.sqlite") as connection:
        connection.execute("UPDATE records SET payload = '{}' WHERE id = 3")
    result = run("show", "--records", "--shape", shape)
    assert result.exit_code == 0
    assert result.stderr.startswith("flashtune: ")
    assert result.stderr.count("\n") == 1
    assert "0.9000" not in result.stdout


def test_verification_status_follows_versions_and_verdict(stored: Stored) -> None:
    record = stored[1]
    assert standing(record) is VerificationStatus.TIMED
    other = msgspec.structs.replace(record.versions, triton="3.5.0")
    assert standing(msgspec.structs.replace(record, versions=other)) is VerificationStatus.UNPROVEN
    failed = Verdict(False, 3.0, 12, "tail", "NVIDIA H200")
    assert standing(msgspec.structs.replace(record, verdict=failed)) is VerificationStatus.UNPROVEN
    assert standing(msgspec.structs.replace(record, verdict=None)) is VerificationStatus.UNPROVEN
    assert (
        standing(msgspec.structs.replace(record, provenance=Provenance.PREDICTED))
        is not VerificationStatus.TIMED
    )


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
