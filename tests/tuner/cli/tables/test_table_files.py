"""Tests of table files in `flashtune export` and `flashtune import`."""

import json
import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.store import open_store
from flashtune.db.table import load_table
from flashtune.tuner.tables import table_files
from flashtune.tuner.tables.table_files import json_table, write_file
from tests.support.records import MakeRecord
from tests.tuner.cli.conftest import Run

Stored = tuple[Record, ...]


def test_exported_table_round_trips(run: Run, stored: Stored, tmp_path: Path) -> None:
    table = tmp_path / "h200.json"
    assert run("export", "--out", table).exit_code == 0
    assert load_table(table).records == (stored[1],)
    other = tmp_path / "other.sqlite"
    result = run("import", table, "--db", other, "--json")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert (counts["records_added"], counts["selections_added"]) == (1, 1)
    again = tmp_path / "again.json"
    run("export", "--db", other, "--out", again)
    assert again.read_bytes() == table.read_bytes()
    assert "1 were known" in run("import", table, "--db", other).stdout


def test_import_of_several_tables_selects_the_fastest_record(
    run: Run, make_record: MakeRecord, tmp_path: Path
) -> None:
    tables, records = [], [make_record("block_m=64,num_warps=4", ms=0.5), make_record("block_m=128", ms=0.7)]
    for number, record in enumerate(records):
        tables.append(tmp_path / f"{number}.json")
        tables[-1].write_bytes(json_table(record.target, [record]))
    fresh = tmp_path / "fresh.sqlite"
    assert run("import", *tables, "--db", fresh).exit_code == 0
    with open_store(str(fresh)) as store:
        assert [entry.record for entry in store.selections()] == records[:1]


def test_tables_of_several_gpus_are_written_to_a_folder(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
    refused = run("export")
    assert refused.exit_code == 2
    assert "need a folder" in refused.stderr
    assert run("export", "--out", tmp_path / "tables").exit_code == 0
    assert sorted(file.name for file in (tmp_path / "tables").iterdir()) == [
        "nvidia-h100.json",
        "nvidia-h200.json",
    ]
    assert len(load_table(tmp_path / "tables" / "nvidia-h200.json").records) == 2
    assert json.loads(run("export", "--target", "h100").stdout)["target"] == "nvidia-h100"


@pytest.mark.parametrize(
    ("kind", "name"), [("json", "t.json"), ("python", "t.py"), ("triton-config", "t.py")]
)
def test_records_of_an_unlisted_gpu_can_be_exported_and_imported(
    run: Run, make_record: MakeRecord, tmp_path: Path, kind: str, name: str
) -> None:
    gpu = msgspec.structs.replace(find_target("h200"), name="nvidia-x9000")
    measured = make_record()
    assert measured.verdict is not None
    verdict = msgspec.structs.replace(measured.verdict, device="NVIDIA X9000")
    record = msgspec.structs.replace(measured, target=gpu.name, gpu=gpu, verdict=verdict)
    copied, out = str(tmp_path / "copied.db"), tmp_path / name
    with open_store(copied) as store:
        store.pin(store.add(record))
    result = run("export", "--db", copied, "--format", kind, "--out", out)
    assert result.exit_code == 0, result.output
    if kind == "json":
        assert load_table(out).records == (record,)
        assert run("import", out).exit_code == 0


def test_target_names_cannot_escape_the_folder(
    run: Run, two_gpus: Stored, make_record: MakeRecord, tmp_path: Path
) -> None:
    hostile = msgspec.structs.replace(make_record(), target="../escaped")
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(hostile))
    result = run("export", "--out", tmp_path / "tables")
    assert result.exit_code == 2
    assert "there is no target '../escaped'" in result.stderr
    assert not list(tmp_path.glob("escaped*"))
    assert run("export", "--format", "python", "--out", tmp_path / "kernels").exit_code == 2
    assert not (tmp_path / "kernels").exists()


def test_nothing_to_export_is_a_failure(run: Run, stored: Stored) -> None:
    result = run("export", "--target", "h100")
    assert result.exit_code == 1
    assert "flashtune search" in result.stderr


HOSTILE = [
    b"",
    b"{" * 100_000,
    b'{"schema": 99, "target": "nvidia-h200", "records": []}',
    b'{"schema": 1, "target": "nvidia-h200", "records": [{"problem": "__import__(\'os\')"}]}',
]


@pytest.mark.parametrize("content", HOSTILE)
def test_invalid_table_leaves_the_database_unchanged(
    run: Run, stored: Stored, tmp_path: Path, content: bytes
) -> None:
    good = tmp_path / "good.json"
    run("export", "--out", good)
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    before = dump(tmp_path / "flashtune.sqlite")
    result = run("import", good, bad)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert "bad.json" in result.stderr
    assert dump(tmp_path / "flashtune.sqlite") == before


def test_a_negative_block_in_a_table_is_refused(run: Run, stored: Stored, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    run("export", "--out", table)
    table.write_text(
        table.read_text(encoding="utf-8").replace('"block_m":128', '"block_m":-128'), encoding="utf-8"
    )
    fresh = tmp_path / "fresh.sqlite"
    assert run("import", table, "--db", fresh).exit_code == 2
    assert not fresh.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        ("import",),
        ("verify", "--table"),
        ("show", "--hf-config"),
        ("show", "--shapes-file"),
        ("search", "--target", "h100", "--from"),
        ("bench", "--load"),
    ],
)
def test_pipe_is_refused_without_blocking(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*arguments, pipe)
    assert result.exit_code == 2
    assert "it is a pipe or a device and no regular file" in result.stderr
    assert result.stderr.count("\n") == 1


def test_dash_writes_to_standard_output(
    run: Run, stored: Stored, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("export",),
        ("export", "--format", "triton-config"),
        ("export", "--format", "python", "--shape", shape),
        ("render", "--shape", shape, "--target", "h200"),
    ):
        result = run(*arguments, "--out", "-")
        assert result.exit_code == 0, result.output
        assert result.stdout == run(*arguments).stdout
    assert not (tmp_path / "-").exists()


def test_devices_and_links_among_them_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(Path(os.devnull), b"new")
    assert not Path(os.devnull).is_file()
    # As /dev/stdout is, where standard output is a file.
    stdout = tmp_path / "stdout"
    stdout.symlink_to(tmp_path / "output")
    monkeypatch.setattr(table_files, "DEVICES", tmp_path)
    (tmp_path / "output").touch()
    write_file(stdout, b"new")
    assert (stdout.is_symlink(), stdout.read_bytes()) == (True, b"new")


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FlashtuneError, match="No space left"):
        write_file(target, b"after")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text(encoding="utf-8") == "before"


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return list(connection.iterdump())
