"""Tests of the commands with a stored native selection and its fallback."""

import json
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record, Resources
from flashtune.core.target import TARGETS, find_target
from flashtune.db.store import open_store
from flashtune.dispatch.versions import current_versions
from flashtune.templates.family import Family
from flashtune.templates.rendering import render
from flashtune.tuner.sram_audit.audit import Request, run_audit
from flashtune.tuner.sram_audit.points import computes_anything
from flashtune.tuner.verify.record_checks import CheckMethod, verify_records
from flashtune.tuner.verify.verify_jobs import Interpretable, check_interpreted
from tests.support.jobs import FakePool
from tests.support.records import MakeRecord
from tests.tuner.cli.conftest import Run
from tests.tuner.sram_audit.audit_fakes import Scripted

H200 = find_target("h200")


@pytest.fixture
def pair(native: Family, problem: Problem, make_record: MakeRecord, tmp_path: Path) -> tuple[Record, Record]:
    """A native selection and its fallback, both in the user's database."""
    portable = make_record(ms=0.5)
    config = native.default(problem, H200)
    selected = msgspec.structs.replace(
        make_record(ms=0.3),
        family=native.name,
        config=config,
        kernel=render(native, problem, config, Specialization()).digest,
        versions=msgspec.structs.replace(portable.versions, template=current_versions(native.name).template),
    )
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.pin(store.add(portable))
        store.pin(store.add(selected))
    return selected, portable


def test_show_distinguishes_selection_and_fallback(run: Run, pair: tuple[Record, Record]) -> None:
    first, second = json.loads(run("show", "--json").stdout)
    assert (first["found"]["record"]["family"], first["is_fallback"]) == ("forward_native", False)
    assert (second["found"]["record"]["family"], second["is_fallback"]) == ("forward_q_outer", True)
    assert "\n  other strides " in run("show").stdout
    assert "forward_q_outer (other strides)" in run("show", "--wide").stdout


def test_export_writes_each_kernel_and_only_triton_configs(
    run: Run, pair: tuple[Record, Record], tmp_path: Path
) -> None:
    assert run("export", "--format", "python", "--out", tmp_path / "kernels").exit_code == 0
    names = sorted(file.name for file in (tmp_path / "kernels").iterdir())
    assert [name.split("_bf16")[0] for name in names] == ["forward_native", "forward_q_outer"]
    result = run("export", "--format", "triton-config")
    assert result.stdout.count("triton.Config(") == 1
    assert "'BLOCK_N'" in result.stdout.replace('"', "'")
    assert "configs of forward_native mean nothing to other kernels" in result.stderr


def test_render_and_explain_use_the_selection(run: Run, pair: tuple[Record, Record], shape: str) -> None:
    rendered = run("render", "--shape", shape, "--target", "h200")
    assert "def forward_native(" in rendered.stdout
    assert (
        "def forward_q_outer("
        in run("render", "--shape", shape, "--target", "h200", "--family", "forward_q_outer").stdout
    )
    explained = json.loads(run("explain", "--shape", shape, "--target", "h200", "--json").stdout)
    (explanation,) = explained if isinstance(explained, list) else [explained]
    assert (explanation["family"], explanation["source"]) == ("forward_native", "database")
    assert {way["name"] for way in explanation["traffic"]} >= {"forward_native", "forward_q_outer"}


def test_native_family_is_refused_on_other_gpus_with_a_reason(run: Run, native: Family, shape: str) -> None:
    result = run("render", "--shape", shape, "--target", "a100", "--family", native.name)
    assert result.exit_code == 2
    assert "runs on sm_90 alone" in result.stderr
    default = run("render", "--shape", shape, "--target", "a100")
    assert "def forward_q_outer(" in default.stdout


def test_doctor_compiles_gluon_kernels_of_the_target(run: Run, native: Family, compiler: mock.Mock) -> None:
    def refuse_gluon(kernel: object, target: object) -> Resources:
        if getattr(kernel, "family", "") == native.name:
            raise KernelError("AttributeError: this Triton calls it otherwise")
        return Resources(sram_bytes=1)

    compiler.side_effect = refuse_gluon
    result = run("doctor", "--target", "h200", "--json")
    assert result.exit_code == 0, result.output
    by_check = {row["name"]: row for row in json.loads(result.stdout)}
    assert by_check["compiler"]["level"] == "ok"
    assert by_check["compiler of forward_native"]["level"] == "warn"
    assert "portable kernels serve" in by_check["compiler of forward_native"]["advice"]
    elsewhere = {row["name"] for row in json.loads(run("doctor", "--target", "a100", "--json").stdout)}
    assert "compiler of forward_native" not in elsewhere


def test_native_sram_model_is_audited_only_on_its_gpus(native: Family) -> None:
    targets = tuple(target for target in TARGETS if computes_anything(native, target))
    assert {target.arch for target in targets} == {"sm_90"}
    both = find_target("a100"), H200
    audit = run_audit(Request(both, 8, seed=1), Scripted(1.0, (1024, 130_000)), lambda *_: None)
    assert [row.target for row in audit.rows if row.family == native.name] == ["nvidia-h200"]
    assert audit.failures() == ()


def test_native_kernels_are_verified_by_receipt_not_interpreter(
    pair: tuple[Record, Record], quick_jobs: FakePool
) -> None:
    interpreted: list[Interpretable] = []
    quick_jobs.replaced[check_interpreted] = interpreted.append
    (result,) = verify_records([pair[0]], gpu=None).results
    assert (result.method, result.failed) == (CheckMethod.RECEIPT, "")
    assert interpreted == []
    unproven = msgspec.structs.replace(pair[0], verdict=None)
    assert "no GPU ever verified it" in verify_records([unproven], gpu=None).results[0].failed


@pytest.mark.usefixtures("pair", "quick_jobs")
def test_summary_lists_kernels_that_were_not_interpreted(run: Run, tmp_path: Path) -> None:
    result = run("verify", "--db", tmp_path / "flashtune.sqlite", "--target", "h200")
    assert result.exit_code == 0, result.output
    assert "1 under the interpreter), 1 by receipt alone" in result.stdout
    assert "no interpreter runs forward_native: without its GPU a receipt is all there is" in result.stdout
