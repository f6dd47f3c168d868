"""Tests of the kernel files of `flashtune render` and `flashtune export --format`."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import triton

from flashtune.bundle.bundle_file import open_bundle
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.store import open_store
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.tables import bundles
from flashtune.tuner.tables.table_files import file_name, kernel_files, triton_configs
from tests.support.bundle_checks import Passes
from tests.support.records import MakeRecord, make_record
from tests.tuner.cli.conftest import Run

Stored = tuple[Record, ...]


def source_of(record: Record) -> str:
    assert record.config is not None
    return render(find_family(record.family), record.problem, record.config, record.specialization).source


def rendered(record: Record, **changes: Any) -> Record:
    """The record with other fields, and with the kernel that renders from them."""
    changed = msgspec.structs.replace(record, **changes)
    assert changed.config is not None
    kernel = render(find_family(changed.family), changed.problem, changed.config, changed.specialization)
    return msgspec.structs.replace(changed, kernel=kernel.digest)


@pytest.mark.slow
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


def test_render_to_an_unwritable_path_is_an_error(run: Run, shape: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    result = run("render", "--shape", shape, "--target", "h100", "--out", tmp_path / "file" / "kernel.py")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_python_export_writes_one_standalone_file_per_kernel(
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


def test_export_of_several_kernels_requires_a_folder(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
    assert run("export", "--format", "python").exit_code == 2
    alone = tmp_path / "alone.py"
    assert run("export", "--format", "python", "--target", "h100", "--out", alone).exit_code == 0
    assert alone.is_file()


def test_file_names_differ_where_kernels_do(make_record: MakeRecord, problem: Problem) -> None:
    record = make_record()
    wide = rendered(record, specialization=Specialization(Alignment.EIGHT, 64, lse=True))
    kernels = [
        render(find_family(row.family), problem, row.config, row.specialization)
        for row in (record, wide)
        if row.config is not None
    ]
    first, second = (file_name(row, kernel) for row, kernel in zip((record, wide), kernels, strict=True))
    assert first.startswith("forward_q_outer_bf16_d64_causal_bottom_right_m")
    assert "_align8_wide_lse_" in second
    assert len(kernel_files((record, wide))) == 2


def test_baselines_have_no_file(make_record: MakeRecord) -> None:
    baseline = msgspec.structs.replace(make_record(), family="sdpa", config=None, kernel=None)
    assert kernel_files((baseline,)) == ()
    assert "triton.Config" not in triton_configs((baseline,)).split("CONFIGS = ")[1]


def test_stored_text_cannot_escape_its_comment(make_record: MakeRecord) -> None:
    record = make_record()
    versions = msgspec.structs.replace(record.versions, flashtune="1\nimport os  # \u2028os.abort()")
    (file,) = kernel_files((msgspec.structs.replace(record, versions=versions),))
    header = file.text.removesuffix(source_of(record))
    assert all(line.startswith("#") or not line for line in header.splitlines())


def test_exported_file_documents_the_gradient_call() -> None:
    shape = "heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,backward"
    (file,) = kernel_files([make_record(shape, family="backward_split")])
    assert file.name.startswith("backward_split_bf16_d64_causal_bottom_right_m")
    assert "# `attention_backward(q, k, v, out, lse, dout, scale)` runs it." in file.text
    assert "def attention_backward(" in file.text


def test_triton_configs_are_valid(run: Run, two_gpus: Stored, tmp_path: Path) -> None:
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
    capped = rendered(two_gpus[2], config=msgspec.structs.replace(chosen, maxnreg=128))
    assert "maxnreg=128" in triton_configs((capped,))


def test_hub_export_writes_a_package_of_selections(
    run: Run,
    two_gpus: tuple[Record, ...],
    make_record: MakeRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundles, "load_receipts", Passes)
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(msgspec.structs.replace(make_record(), target="nvidia-h900")))
    result = run("export", "--format", "hf-kernel", "--out", tmp_path / "package")
    assert result.exit_code == 0, result.output
    built = tmp_path / "package/build/torch-cuda"
    entries = json.loads((built / "kernels.json").read_text(encoding="utf-8"))
    assert sorted(entry["gpu"] for entry in entries) == ["nvidia-h100", "nvidia-h200", "nvidia-h200"]
    assert {entry["file"] for entry in entries} == {path.name for path in (built / "kernels").iterdir()}
    assert {path.name for path in built.iterdir()} == {
        "__init__.py",
        "bundle.py",
        "driver.py",
        "kernels",
        "kernels.json",
        "kernels.sm_90.bundle",
        "metadata.json",
    }
    assert f"wrote {len(two_gpus) - 1 + 6} files" in result.stderr
    assert "the selections of nvidia-h900 were left out" in result.stderr
    assert run("export", "--format", "hf-kernel").exit_code == 2
    bundle = tmp_path / "kernels.bundle"
    assert run("export", "--format", "bundle", "--out", bundle).exit_code == 0
    assert bundle.read_bytes() == (built / "kernels.sm_90.bundle").read_bytes()
    assert {*open_bundle(bundle).index.entries} == {entry["kernel"] for entry in entries}
    monkeypatch.setattr(bundles, "load_receipts", lambda target: {})
    refused = run("export", "--format", "bundle", "--out", tmp_path / "none.bundle")
    assert "none of these selections has verified machine code" in refused.stderr
    # A search stores its machine code there.
    (tmp_path / "flashtune.sqlite.sm_90.bundle").write_bytes(bundle.read_bytes())
    again = tmp_path / "again.bundle"
    assert run("export", "--format", "bundle", "--out", again).exit_code == 0
    assert again.read_bytes() == bundle.read_bytes()
    (tmp_path / "flashtune.sqlite.sm_90.bundle").chmod(0o666)
    assert "another user can have written" in run("export", "--format", "bundle", "--out", again).stderr
