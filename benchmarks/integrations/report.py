"""The tables of the integrations' pages, from saved results. A table without a result says so."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.integrations import models, torch_flex_suite, transformers_models
from benchmarks.integrations.torch_sdpa_suite import Report
from benchmarks.saved import RESULTS, Saved, Source, load, run_of
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/integrations/report.py"
NOT_MEASURED = "Not measured."
# Files in benchmarks/results.
MODELS = "nvidia-h200-models.json.gz"
TRANSFORMERS = tuple(f"nvidia-{gpu}-transformers-models.json.gz" for gpu in ("h200", "h100"))
SDPA = "nvidia-h200-torch-sdpa-suite.json.gz"
FLEX = "nvidia-h200-torch-flex-suite.json.gz"
FLASH_ATTN = {version: f"nvidia-h200-flash-attn-{version}-suite.json.gz" for version in (2, 3, 4)}

Rows = TypeVar("Rows")


class Counts(msgspec.Struct, frozen=True):
    """Outcomes of FlashAttention's own tests, of `benchmarks.integrations.flash_attn_suite`."""

    version: int  # Version of FlashAttention.
    passed: int  # Number of cases that passed.
    refused: int  # Cases that raised `UnsupportedError`.
    failed: int  # Cases that failed.


def texts(folder: Path = RESULTS) -> dict[str, str]:
    """Returns the tables by name."""
    made = {
        "models": _models(folder),
        "transformers-models": _transformers(folder),
        "flash-attn-suite": _flash_attn(folder),
        "torch-sdpa-suite": _sdpa(folder),
        "torch-flex-suite": _flex(folder),
    }
    return {name: "\n".join(lines) or NOT_MEASURED for name, lines in made.items()}


def _models(folder: Path) -> Iterator[str]:
    saved = _saved(folder / MODELS, list[models.Row])
    if saved is None:
        return
    versions = ", ".join(sorted({row.transformers for row in saved.rows}))
    yield from _heading(saved.source, f", transformers {versions}")
    cells = (
        (row.workload, _ms(row.sdpa_ms), _ms(row.flashtune_ms), f"{row.speedup:.2f}") for row in saved.rows
    )
    yield from table(("workload", "`sdpa`, ms", "with flashtune, ms", "ratio"), cells)


def _transformers(folder: Path) -> Iterator[str]:
    reports = [
        saved for name in TRANSFORMERS if (saved := _saved(folder / name, list[transformers_models.Row]))
    ]
    for number, saved in enumerate(reports):
        if number:
            yield ""
        yield from _of_models(saved)


def _of_models(saved: Saved[list[transformers_models.Row]]) -> Iterator[str]:
    versions = ", ".join(sorted({row.transformers for row in saved.rows}))
    yield from _heading(saved.source, f", transformers {versions}")
    cells = (
        (row.workload, f"`{row.usual}`", _ms(row.usual_ms), _ms(row.flashtune_ms), f"{row.speedup:.2f}")
        for row in saved.rows
    )
    yield from table(("workload", "best of transformers", "its ms", "flashtune, ms", "ratio"), cells)


def _flash_attn(folder: Path) -> Iterator[str]:
    reports = [saved for name in FLASH_ATTN.values() if (saved := _saved(folder / name, Counts))]
    if not reports:
        return
    yield from _heading(reports[0].source)
    cells = (
        (f"FlashAttention {counts.version}", str(counts.passed), str(counts.refused), str(counts.failed))
        for counts in (each.rows for each in reports)
    )
    yield from table(("tests", "passed", "refused", "failed"), cells)


def _sdpa(folder: Path) -> Iterator[str]:
    saved = _saved(folder / SDPA, Report)
    if saved is None:
        return
    report = saved.rows
    yield from _heading(saved.source)
    counts = {
        "pass with torch's operators": report.passed_without,
        "of these, pass with flashtune": report.passed_with,
        "of these, flashtune serves calls in": report.served,
        "and backward passes in": report.served_backward,
    }
    yield from table(
        ("cases of PyTorch's own tests", "number"), ((name, str(count)) for name, count in counts.items())
    )


def _flex(folder: Path) -> Iterator[str]:
    saved = _saved(folder / FLEX, torch_flex_suite.Report)
    if saved is None:
        return
    yield from _heading(saved.source)
    outcomes = ("passed", "refused", "failed", "stopped", "not reached", "failed without flashtune")
    counts = [(name, saved.rows.outcomes.get(name, 0)) for name in outcomes]
    yield from table(("PyTorch's own cases", "number"), ((name, str(count)) for name, count in counts))
    yield ""
    cells = ((f"`{sentence}`", str(count)) for sentence, count in saved.rows.refusals.items())
    yield from table(("refusal", "calls"), cells)


def _saved(path: Path, kind: type[Rows]) -> Saved[Rows] | None:
    """Returns a saved result, or None if there is no file."""
    return load(path, kind) if path.exists() else None


def _heading(source: Source, more: str = "") -> Iterator[str]:
    yield f"{run_of(source, more)}:"
    yield ""


def _ms(times: tuple[float, ...]) -> str:
    return f"{statistics.median(times):.1f}"
