"""render, export and import: kernels and tables as files."""

from __future__ import annotations

import ast
import importlib.util
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import triton
from click.testing import Result

from flashtune.db.store import open_store
from flashtune.db.table import load_table
from flashtune.errors import FlashtuneError
from flashtune.kernel import Alignment, Specialization
from flashtune.problem import Problem
from flashtune.record import Record
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.export import file_name, json_table, kernel_files, triton_configs, write_file

Run = Callable[..., Result]
MakeRecord = Callable[..., Record]
Stored = tuple[Record, ...]


@pytest.fixture
def two_gpus(run: Run, make_record: MakeRecord, problem: Problem, tmp_path: Path) -> Stored:
    """Selections of two lengths on an H200, with one kernel, and of one on an H100."""
    longer = msgspec.structs.replace(problem, seqlen_q=2048, seqlen_kv=2048)
    records = (make_record(), make_record(of=longer, ms=1.5), make_record("block_n=32", target="nvidia-h100"))
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        for record in records:
            store.pin(store.add(record))
    return records


def source_of(record: Record) -> str:
    assert record.config is not None
    return render(find_family(record.family), record.problem, record.config, record.specialization).source


def test_render_writes_the_selection(run: Run, stored: Stored, shape: str, tmp_path: Path) -> None:
    result = run("render", "--shape", shape, "--target", "h200")
    assert result.exit_code == 0, result.output
    assert result.stdout == source_of(stored[1])
    assert "(database)" in result.stderr
    out = tmp_path / "deep" / "kernel.py"
    assert run("render", "--shape", shape, "--target", "h200", "--out", out).stdout == ""
    assert out.read_text(encoding="utf-8") == source_of(stored[1])
    assert list(out.parent.iterdir()) == [out]


def test_render_of_a_config_and_a_family(run: Run, shape: str) -> None:
    arguments = ("render", "--shape", shape, "--target", "a100", "--family", "forward_kv_outer")
    result = run(*arguments, "--config", "block_m=32,block_n=32")
    assert result.exit_code == 0, result.output
    assert "block_m=32 block_n=32" in result.stderr
    assert "def forward_kv_outer(" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--model", "phi-2", "--seqlen", "128|256"), "given 2 shapes"),
        (("--model", "phi-2", "--config", "block=1"), "did you mean"),
        (("--model", "phi-2", "--family", "nope"), "there is no kernel family"),
    ],
)
def test_render_refuses(run: Run, arguments: tuple[str, ...], part: str) -> None:
    result = run("render", "--target", "h100", *arguments)
    assert result.exit_code == 2
    assert part in result.stderr


def test_render_where_nothing_can_be_written(run: Run, shape: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    result = run("render", "--shape", shape, "--target", "h100", "--out", tmp_path / "file" / "kernel.py")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_a_table_goes_out_and_comes_in_again(run: Run, stored: Stored, tmp_path: Path) -> None:
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


def test_of_tables_of_one_shape_the_fastest_record_serves(
    run: Run, make_record: MakeRecord, tmp_path: Path
) -> None:
    tables, records = [], [make_record("block_m=64", ms=0.5), make_record("block_m=128", ms=0.7)]
    for number, record in enumerate(records):
        tables.append(tmp_path / f"{number}.json")
        tables[-1].write_bytes(json_table(record.target, [record]))
    fresh = tmp_path / "fresh.sqlite"
    assert run("import", *tables, "--db", fresh).exit_code == 0
    with open_store(str(fresh)) as store:
        assert [entry.record for entry in store.selections()] == records[:1]


def test_tables_of_several_gpus_go_into_a_folder(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
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


def test_a_hostile_target_name_reaches_no_path(
    run: Run, two_gpus: Stored, make_record: MakeRecord, tmp_path: Path
) -> None:
    hostile = msgspec.structs.replace(make_record(), target="../escaped\n")
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(hostile))
    result = run("export", "--out", tmp_path / "tables")
    assert result.exit_code == 2
    assert "is no file name" in result.stderr
    assert not list(tmp_path.glob("escaped*"))
    assert run("export", "--format", "python", "--out", tmp_path / "kernels").exit_code == 0
    for file in (tmp_path / "kernels").iterdir():
        ast.parse(file.read_text(encoding="utf-8"))


def test_nothing_to_export_is_a_failure(run: Run, stored: Stored) -> None:
    result = run("export", "--target", "h100")
    assert result.exit_code == 1
    assert "flashtune search" in result.stderr


def test_python_files_are_one_for_each_kernel_and_stand_alone(
    run: Run, two_gpus: Stored, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    assert run("export", "--format", "python", "--out", folder).exit_code == 0
    files = sorted(folder.iterdir())
    assert len(files) == 2
    shared = next(file for file in files if "n32" not in file.name)
    text = shared.read_text(encoding="utf-8")
    assert all(record.problem.key in text for record in two_gpus[:2])
    assert "0.5000 ms measured" in text
    assert text.endswith(source_of(two_gpus[0]))
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {
            name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        }
        assert imported == {"torch", "triton", "triton.language"}
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    spec = importlib.util.spec_from_file_location("exported", shared)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.attention)


def test_several_kernels_need_a_folder(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
    assert run("export", "--format", "python").exit_code == 2
    alone = tmp_path / "alone.py"
    assert run("export", "--format", "python", "--target", "h100", "--out", alone).exit_code == 0
    assert alone.is_file()


def test_file_names_differ_where_kernels_do(make_record: MakeRecord, problem: Problem) -> None:
    record = make_record()
    wide = msgspec.structs.replace(record, specialization=Specialization(Alignment.EIGHT, 64, lse=True))
    kernels = [
        render(find_family(one.family), problem, one.config, one.specialization)
        for one in (record, wide)
        if one.config is not None
    ]
    first, second = (file_name(one, kernel) for one, kernel in zip((record, wide), kernels, strict=True))
    assert first.startswith("forward_q_outer_bf16_d64_causal_bottom_right_m")
    assert "_align8_wide_lse_" in second
    assert len(kernel_files((record, wide))) == 2


def test_baselines_have_no_file(make_record: MakeRecord) -> None:
    baseline = msgspec.structs.replace(make_record(), family="sdpa", config=None, kernel=None)
    assert kernel_files((baseline,)) == ()
    assert "triton.Config" not in triton_configs((baseline,)).split("CONFIGS = ")[1]


def test_stored_text_stays_in_its_comment(make_record: MakeRecord) -> None:
    record = make_record()
    versions = msgspec.structs.replace(record.versions, flashtune="1\nimport os  # \u2028os.abort()")
    (file,) = kernel_files(
        (msgspec.structs.replace(record, versions=versions, target="x\r\nraise SystemExit"),)
    )
    header = file.text.removesuffix(source_of(record))
    assert all(line.startswith("#") or not line for line in header.splitlines())


def test_triton_configs_are_what_triton_takes(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
    out = tmp_path / "configs.py"
    assert run("export", "--format", "triton-config", "--out", out).exit_code == 0
    spec = importlib.util.spec_from_file_location("configs", out)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.CONFIGS["nvidia-h100"][two_gpus[2].problem.key]
    assert isinstance(config, triton.Config)
    chosen = two_gpus[2].config
    assert chosen is not None
    assert config.kwargs["BLOCK_N"] == 32
    assert (config.num_warps, config.num_stages, config.maxnreg) == (
        chosen.num_warps,
        chosen.num_stages,
        None,
    )
    capped = msgspec.structs.replace(two_gpus[2], config=msgspec.structs.replace(chosen, max_registers=128))
    assert "maxnreg=128" in triton_configs((capped,))


HOSTILE = [
    b"",
    b"[]",
    b"{" * 100_000,
    b'{"schema": 99, "target": "nvidia-h200", "records": []}',
    b'{"schema": 1, "target": "nvidia-h200", "records": [], "extra": 1}',
    b'{"schema": 1, "target": "nvidia-h200", "records": [{"problem": "__import__(\'os\')"}]}',
    b"\x00\xff" * 1000,
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_hostile_table_leaves_the_database_as_it_was(
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


def test_a_missing_table_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    assert run("import", tmp_path / "none.json").exit_code == 2
    assert run("import").exit_code == 2


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FlashtuneError, match="No space left"):
        write_file(target, b"after")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text(encoding="utf-8") == "before"


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return list(connection.iterdump())
