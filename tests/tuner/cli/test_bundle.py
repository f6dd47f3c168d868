"""Tests of `flashtune bundle`: builds are reproducible, and files are checked before they are used."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune import testing
from flashtune.bundle.bundle_file import dump_bundle
from flashtune.bundle.records import Receipt
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.db.table import shipped_table
from flashtune.dispatch.lookup import select
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.bundles import recipe_of
from flashtune.tuner.tables import bundles
from flashtune.tuner.tables.bundles import coverage_calls, table_calls
from flashtune.tuner.tables.warm import Call, calls_of, tables_with
from flashtune.tuner.workloads.shapes import parse_shape
from tests.bundle.conftest import VERDICT, make_entry
from tests.support.golden_kernels import KERNELS, problem_of
from tests.tuner.cli.conftest import Run

H200 = find_target("h200")
SHAPE = "heads=8,seqlen=512,head_dim=64"


@pytest.mark.slow
def test_two_builds_in_other_folders_give_the_same_bytes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for name in ("a", "a_longer_name"):
        monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        files.append(tmp_path / f"{name}.bundle")
        built = run("bundle", "build", "--target", "a100", "--shape", SHAPE, "--out", files[-1], "-q")
        # No output is packed, so no kernel clears a tail.
        assert f"{files[-1]} has 1 kernels for sm_80, of which 0 have a receipt" in built.stdout
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    arguments = ["bundle", "build", "--target", "a100", "--shape", SHAPE, "--out", tmp_path / "c.bundle"]
    assert run(*arguments, "--base", files[0]).exit_code == 0
    assert (tmp_path / "c.bundle").read_bytes() == files[0].read_bytes()
    assert not [*(tmp_path / "empty").rglob("*.cubin")], "the base has the kernel"
    rows = json.loads(run("bundle", "list", files[0], "--json").stdout)
    receipt = Receipt(rows[0]["machine"], "nvidia-a100", "580.1", VERDICT)
    monkeypatch.setattr(bundles, "load_receipts", lambda target: {receipt.machine: receipt})
    verified = run(*arguments, "--base", files[0], "-q")
    assert "of which 1 have a receipt" in verified.stdout
    families = {row["family"]: row["functions"] for row in rows}
    assert families == {"forward_q_outer": ["forward_q_outer"]}
    both = tmp_path / "both.bundle"
    merged = run("bundle", "merge", *files, "--out", both)
    assert f"{both} has 1 kernels for sm_80, of which 0 have a receipt" in merged.stdout
    assert both.read_bytes() == files[0].read_bytes()


def test_damaged_file_is_one_sentence(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kernels.bundle"
    path.write_bytes(b"FTBUNDLE" + bytes(60))
    for command in ("list", "merge"):
        result = run("bundle", command, path)
        assert result.exit_code == 2
        assert result.stderr.startswith("flashtune: ") or "bundle" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    missing = run("bundle", "list", tmp_path / "nothing")
    assert "cannot read the bundle" in missing.stderr


def test_other_gpus_and_their_tables_are_refused(run: Run, tmp_path: Path) -> None:
    result = run("bundle", "build", "--target", "mi300x", "--shape", SHAPE, "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert "bundles hold code of NVIDIA's GPUs" in result.stderr


@pytest.mark.slow
def test_comments_and_paths_do_not_change_machine_code() -> None:
    name = "kv_outer_bf16_d64"
    kernel, problem, h200 = KERNELS[name](), problem_of(name), H200
    commented = msgspec.structs.replace(
        kernel, family="commented", source="# A comment.\n" * 9 + kernel.source
    )
    assert commented.digest != kernel.digest, "it is compiled again, in a file of another name"
    entries = [entry_of(each, problem, compile_binary(each, h200), "12.8")[0] for each in (kernel, commented)]
    assert entries[0].stages == entries[1].stages
    assert entries[0].machine == entries[1].machine


def test_default_bundle_covers_the_table_and_untuned_shapes() -> None:
    table = shipped_table("nvidia-h200")
    assert table is not None
    tuned = {record.problem for record in table.records if record.config}
    assert {problem for problem, _ in table_calls(table)} == tuned
    calls = list(coverage_calls())
    assert {problem.head_dim for problem, _ in calls} == {32, 64, 80, 96, 128, 160, 192, 256}
    assert {(problem.is_backward, assumed.lse) for problem, assumed in calls} == {
        (backward, lse) for backward in (False, True) for lse in (False, True)
    }
    assert all(problem.batch_invariant or len(problem.features) <= 1 for problem, _ in calls)


def recipes(calls: Iterable[Call]) -> list[tuple[str, Record]]:
    """Returns the recipe and the record of the kernel that dispatch chooses for each call."""
    tables = tables_with(H200, [])
    records = (
        (select(each, H200, tables, tensors, generated=True).record, tensors) for each, tensors in calls
    )
    return [(recipe_of(record, tensors), record) for record, tensors in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family", "least"),
    [
        ("head_dim=128,dtype=bf16", "forward_hopper", 0.8),
        ("head_dim=96,dtype=bf16", "forward_hopper", 0.5),
        ("head_dim=128,dtype=fp32", "forward_masked", 0.8),
        ("head_dim=128,dtype=bf16,page_size=16", "forward_hopper", 0.5),
    ],
)
def test_default_bundle_splits_the_keys_of_few_queries(shape: str, family: str, least: float) -> None:
    (like,) = parse_shape(f"heads=8,seqlen=64,causal=bottom_right,{shape}")
    computation, few = like.computation, range(17, 513)

    def split(calls: Iterable[Call]) -> list[str]:
        alike = ((p, t) for p, t in calls if p.computation == computation and p.seqlen_q in few and not t.lse)
        chosen = ((recipe, r) for recipe, r in recipes(alike) if r.family == family)
        return [recipe for recipe, record in chosen if getattr(record.config, "num_splits", 1) > 1]

    covered = set(split(coverage_calls()))
    # Other random shapes.
    others = split(bundles._split_calls(random.Random(7)))
    assert len(others) > 10
    assert sum(recipe in covered for recipe in others) > least * len(others)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_default_bundle_has_batch_invariant_kernels(dtype: str) -> None:
    invariant = [call for call in coverage_calls() if call[0].batch_invariant and call[0].head_dim == 128]
    covered = {recipe for recipe, _ in recipes(invariant)}
    lengths = "seqlen_q=1,seqlen_kv=1500|30000", "seqlen_q=256,seqlen_kv=9000", "seqlen=5000"
    for length in lengths:
        text = f"heads=32,kv_heads=8,batch=2,{length},head_dim=128,dtype={dtype},causal=bottom_right"
        chosen = recipes(calls_of(parse_shape(f"{text},batch_invariant")))
        assert [record.problem.key for recipe, record in chosen if recipe not in covered] == []


def test_verification_without_a_gpu_is_one_sentence(run: Run, tmp_path: Path) -> None:
    result = run("bundle", "verify", tmp_path / "kernels.bundle")
    assert result.exit_code == 2
    assert "--devices needs a GPU, and none is visible" in result.stderr


def without_usual_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the calls of the shipped table and of untuned shapes."""
    monkeypatch.setattr("flashtune.db.table.shipped_table", lambda name: None)
    monkeypatch.setattr(bundles, "coverage_calls", lambda: ())


def test_report_of_a_verification_counts_kernels_without_a_known_call(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("flashtune.core.target.device_target", lambda index: find_target("h200"))
    without_usual_calls(monkeypatch)
    (verified, codes), (other, other_codes) = make_entry(1, b"one"), make_entry(2, b"two")
    entries = [verified, msgspec.structs.replace(other, receipts=())]
    path, out = tmp_path / "kernels.bundle", tmp_path / "out.bundle"
    path.write_bytes(dump_bundle("sm_90", "1.0", entries, codes | other_codes))
    command = ("bundle", "verify", path, "--processes", "1", "--devices")
    report = json.loads(run(*command, "0,1", "--out", out, "--json").stdout)
    del report["seconds"]
    counts = {"verified": 0, "earlier": 1, "failed": {}, "unused": 1, "left": 0}
    assert report == {"file": str(out), **counts}
    assert "1 kernels are not verified" in run(*command, "all").stdout
    assert "exists: verify it to continue" in run(*command, "all", "--out", out).stderr
    assert "numbers below 2" in run(*command, "2").stderr


def test_verification_knows_the_calls_of_named_shapes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("flashtune.core.target.device_target", lambda index: find_target("h200"))
    without_usual_calls(monkeypatch)
    known: list[tuple[Problem, Specialization]] = []

    def no_uses(
        bundle: object, kernels: object, calls: list[tuple[Problem, Specialization]], *_: object
    ) -> Any:
        known.extend(calls)
        return {}

    monkeypatch.setattr("flashtune.tuner.verify.bundle_verification.uses_of", no_uses)
    entry, codes = make_entry(1, b"one")
    path = tmp_path / "kernels.bundle"
    path.write_bytes(dump_bundle("sm_90", "1.0", [msgspec.structs.replace(entry, receipts=())], codes))
    assert run("bundle", "verify", path, "--processes", "1", "--shape", SHAPE).exit_code == 0
    assert {problem for problem, _ in known} == {testing.problem(SHAPE)}
