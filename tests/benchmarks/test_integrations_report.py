"""Tests of the tables of the integrations' pages."""

from pathlib import Path

from benchmarks.integrations import models, report, transformers_models
from benchmarks.integrations.torch_sdpa_suite import Report
from benchmarks.saved import save


def test_missing_results_are_named(tmp_path: Path) -> None:
    assert set(report.texts(tmp_path).values()) == {"Not measured."}


def test_tables_have_the_saved_results(tmp_path: Path) -> None:
    save(tmp_path / report.MODELS, [models.Row("train", (3.0, 2.0, 4.0), (1.5, 1.0, 2.0), 2.0, "5.17.0")])
    row = transformers_models.Row("T5, train", "sdpa", (3.0,), (2.0,), 1.5, {"sdpa": 2.9}, "5.17.0")
    save(tmp_path / report.TRANSFORMERS[0], [row])
    counts = {"version": 3, "passed": 970, "refused": 30, "failed": 0, "refusals": {}}
    save(tmp_path / report.FLASH_ATTN[3], counts)
    suite = Report("00", 0, False, 9.0, 50, 48, 47, 40, 30, 7, {"A.b": "why"}, {}, {})
    save(tmp_path / report.SDPA, suite)
    texts = report.texts(tmp_path)
    assert "| train | 3.0 | 1.5 | 2.00 |" in texts["models"]
    assert "transformers 5.17.0):" in texts["models"]
    assert "| T5, train | `sdpa` | 3.0 | 2.0 | 1.50 |" in texts["transformers-models"]
    assert "| FlashAttention 3 | 970 | 30 | 0 |" in texts["flash-attn-suite"]
    assert "| pass with torch's operators | 48 |" in texts["torch-sdpa-suite"]
    assert "| of these, pass with flashtune | 47 |" in texts["torch-sdpa-suite"]
