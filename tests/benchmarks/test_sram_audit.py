"""Tests of the page of the SRAM audit."""

from pathlib import Path

import msgspec

from benchmarks.kernels.report import AUDIT, audit_texts
from benchmarks.saved import decoded
from flashtune.templates.registry import families
from flashtune.tuner.sram_audit.audit import Audit, Row


def test_saved_run_contains_every_family() -> None:
    audit = decoded(AUDIT, Audit)
    assert {row.family for row in audit.rows} == {family.name for family in families()}


def test_gpu_outside_the_error_bounds_is_named(tmp_path: Path) -> None:
    row = Row("forward_q_outer", "nvidia-h100", "sm_90", 40, 5, 3, 4, 36, 0, 5, 0, 1.0, 0)
    path = tmp_path / "audit.json"
    path.write_bytes(msgspec.json.encode(Audit("3.7.1", 0, (row,))))
    assert "- nvidia-h100: 5 of 36 that do not fit were caught" in audit_texts(path)["sram-audit"]
    passing = msgspec.structs.replace(row, caught=36)
    path.write_bytes(msgspec.json.encode(Audit("3.7.1", 0, (passing,))))
    assert audit_texts(path)["sram-audit"].endswith("or cannot be judged:\n\n- none")
