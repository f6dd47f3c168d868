import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from click.testing import Result

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.core.errors import KernelError
from flashtune.core.machine import triton_version
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.db.table import TunedTable
from flashtune.dispatch.platform import PLATFORM
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.analysis.doctor import Level, bundles, examine, gpu, interpreter, library, shipped
from tests.bundle.conftest import make_entry
from tests.support.families import Ship
from tests.support.records import MakeRecord
from tests.tuner.cli.conftest import Run


def findings(result: Result) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["level"], row["message"]) for row in json.loads(result.stdout)}


def test_healthy_machine(run: Run, compiler: mock.Mock) -> None:
    result = run("doctor", "--target", "h100", "--json")
    assert result.exit_code == 0, result.output
    by_check = findings(result)
    for name in ("python", "torch", "triton", "kernel cache", "triton cache", "database", "compiler"):
        assert by_check[name][0] == "ok", by_check[name]
    assert "none yet" in by_check["database"][1]


def test_text_output_has_one_line_per_check(run: Run, compiler: mock.Mock) -> None:
    result = run("doctor", "--target", "mi300x")
    assert result.exit_code == 0
    assert all(line[:4].strip() in ("ok", "warn", "fail") for line in result.stdout.splitlines())
    assert "gfx942" in result.stdout


def test_each_step_is_reported_before_it_begins(run: Run, compiler: mock.Mock) -> None:
    steps: list[str] = []
    told = [len(steps) for _ in examine(find_target("h100"), None, steps.append)]
    assert told == sorted(told)
    assert told[0] == 0
    assert steps[0] == "importing torch and triton"
    assert any(step == "compiling a kernel of forward_q_outer for nvidia-h100" for step in steps)


def test_terminal_shows_the_current_step(
    run: Run, compiler: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "importing torch and triton ..." in run("doctor", "--target", "h100").stderr
    assert run("doctor", "--target", "h100", "--no-progress").stderr == ""
    assert run("doctor", "--target", "h100", "--quiet").stderr == ""


@pytest.mark.slow
def test_compiler_check_passes(run: Run) -> None:
    assert findings(run("doctor", "--target", "a100", "--json"))["compiler"][0] == "ok"


def test_compiler_error_is_a_failure(run: Run, compiler: mock.Mock) -> None:
    compiler.side_effect = KernelError("ptxas failed (FileNotFoundError): reinstall triton")
    result = run("doctor", "--target", "h100")
    assert result.exit_code == 1
    assert "fail  compiler" in result.stdout


def test_a_damaged_database_is_a_failure(run: Run, compiler: mock.Mock, tmp_path: Path) -> None:
    (tmp_path / "flashtune.sqlite").write_bytes(b"damaged, and long enough to be looked at" * 100)
    result = run("doctor", "--target", "h100", "--json")
    assert result.exit_code == 1
    assert findings(result)["database"][0] == "fail"


def test_unwritable_cache_is_a_failure(
    run: Run, compiler: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = run("doctor", "--target", "h100", "--json")
    assert result.exit_code == 1
    assert findings(result)["kernel cache"][0] == "fail"


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.9.1", Level.FAIL),
        ("3.6.0", Level.OK),
        ("3.9.0+git1", Level.OK),
        ("3.10.0", Level.WARN),
        ("odd", Level.FAIL),
    ],
)
def test_versions_are_compared_with_supported_ones(
    monkeypatch: pytest.MonkeyPatch, version: str, level: Level
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    assert library("triton", (3, 6), (3, 9)).level is level


def test_import_error_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = 'raise OSError("libcudart.so.13: cannot open shared object file")'
    (tmp_path / "damaged.py").write_text(error, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    finding = library("damaged", (2, 10), None)
    assert finding.level is Level.FAIL
    assert "libcudart" in finding.message


def test_bundles_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kernels.bundle"
    monkeypatch.setenv("FLASHTUNE_BUNDLE", str(path))
    entry, codes = make_entry(1, b"code")
    path.write_bytes(dump_bundle("sm_90", "1", [entry], codes))
    h100, a100 = find_target("h100"), find_target("a100")
    assert [(found.level, found.message) for found in bundles(h100)] == [
        (Level.OK, f"{path}, 1 kernels for sm_90")
    ]
    assert "is for sm_90, not for sm_80: use another" in next(bundles(a100)).message
    path.write_bytes(b"")
    (damaged,) = bundles(h100)
    assert (damaged.level, "is not a bundle" in damaged.message) == (Level.WARN, True)
    monkeypatch.delenv("FLASHTUNE_BUNDLE")
    assert [found.message for found in bundles(h100)] == ["none for sm_90: first calls compile their kernels"]


def test_a_gpu_is_compared_with_the_table() -> None:
    h100 = find_target("h100")
    assert gpu(0, h100).level is Level.OK
    slice_of_one = msgspec.structs.replace(h100, sm_count=60)
    assert "sm_count 60 instead of 132" in gpu(0, slice_of_one).message
    assert gpu(0, msgspec.structs.replace(h100, name="nvidia-h800")).level is Level.WARN


@pytest.mark.parametrize(
    ("triton", "bundled", "left"), [(triton_version(), 0, 0), ("99.0", 0, 2), ("99.0", 1, 1)]
)
def test_shipped_kernels_are_counted_as_in_dispatch(
    make_record: MakeRecord, problem: Problem, ship: Ship, triton: str, bundled: int, left: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    longer = msgspec.structs.replace(problem, seqlen_q=2048, seqlen_kv=2048)
    made = [make_record("block_m=64"), make_record("block_m=128", of=longer)]
    here = current_versions(made[0].family)
    versions = msgspec.structs.replace(here, triton=triton)
    records = tuple(msgspec.structs.replace(record, versions=versions) for record in made)
    ship(TunedTable(target=records[0].target, records=records))
    found = records[:bundled]
    monkeypatch.setattr(PLATFORM.bundles, "find", lambda record, *_: record if record in found else None)
    finding = shipped(find_target("h200"))
    assert finding.level is (Level.WARN if left else Level.OK)
    assert f"2 kernels, {f'{left} not' if left else 'all'} verified" in finding.message


def test_interpreter_requires_older_numpy_under_triton_3_6(
    interpret: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interpreter().level is Level.OK
    interpret()
    monkeypatch.setattr("triton.__version__", "3.6.0")
    for version, level in (("2.4.1", Level.FAIL), ("2.3.5", Level.WARN)):
        monkeypatch.setattr("numpy.__version__", version)
        assert interpreter().level is level


@pytest.mark.gpu
def test_gpu_of_this_machine_is_in_the_table(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    by_check = findings(result)
    assert by_check["gpu 0"][0] in ("ok", "warn")
    assert by_check["driver"][1] != "none"
