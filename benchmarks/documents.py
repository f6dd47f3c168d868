"""Writes the tables, figures and charts of the documentation from saved results.

    python -m benchmarks.documents             # lists the pages that differ from the results
    python -m benchmarks.documents --write     # writes them

A table is between `<!-- table NAME: written by SCRIPT -->` and `<!-- end of table NAME -->`. A number within
a sentence is a figure (`benchmarks/figures.py`). No GPU is needed. Pictures
need kaleido and Chromium to be written.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import (
    device_searches,
    efforts_report,
    fleet_report,
    saved,
    search_report,
    speed_charts,
    tables,
)
from benchmarks.analysis import report as analysis_report
from benchmarks.charts import PICTURES, is_current, write_svg
from benchmarks.dispatch_regret import regret
from benchmarks.exhaustive import axes, prediction
from benchmarks.figures import with_figures
from benchmarks.host import first_call, first_use
from benchmarks.integrations import report as integrations_report
from benchmarks.kernels import (
    bias_gradients,
    drafts,
    fastest,
    flex,
    flex_gradients,
    fp8_error,
    gym,
    invariance,
    limits,
    serving,
    splits,
    tritons,
)
from benchmarks.kernels import report as kernels_report
from benchmarks.numbers import pages
from benchmarks.saved import RESULTS, ROOT
from benchmarks.search_replay import policies_report
from benchmarks.training import report as training_report
from flashtune.core.errors import FlashtuneError, UsageError
from scripts.reference import feature_table, key_table
from tests.mutants import pages as mutants

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TABLE = re.compile(r"<!-- table ([\w-]+): written by (.+?) -->")

# Tables by name, for each script that pages name.
SCRIPTS: dict[str, Callable[[], Mapping[str, str]]] = {
    tables.SCRIPT: lambda: tables.texts(tables.RESULTS),
    training_report.SCRIPT: training_report.texts,
    policies_report.SCRIPT: policies_report.texts,
    prediction.SCRIPT: prediction.texts,
    axes.SCRIPT: axes.texts,
    fastest.SCRIPT: fastest.texts,
    tritons.SCRIPT: tritons.texts,
    efforts_report.SCRIPT: efforts_report.texts,
    device_searches.SCRIPT: device_searches.texts,
    first_call.SCRIPT: first_call.texts,
    first_use.SCRIPT: first_use.texts,
    fp8_error.SCRIPT: fp8_error.texts,
    kernels_report.SCRIPT: kernels_report.texts,
    limits.SCRIPT: limits.texts,
    integrations_report.SCRIPT: integrations_report.texts,
    "scripts/reference.py": lambda: {"features": feature_table(), "shape-keys": key_table()},
    saved.SCRIPT: saved.texts,
    analysis_report.SCRIPT: analysis_report.texts,
    fleet_report.SCRIPT: fleet_report.texts,
    search_report.SCRIPT: search_report.texts,
    serving.SCRIPT: serving.texts,
    splits.SCRIPT: splits.texts,
    drafts.SCRIPT: drafts.texts,
    invariance.SCRIPT: invariance.texts,
    flex.SCRIPT: flex.texts,
    flex_gradients.SCRIPT: flex_gradients.texts,
    gym.SCRIPT: gym.texts,
    bias_gradients.SCRIPT: bias_gradients.texts,
    regret.SCRIPT: lambda: regret.texts(RESULTS),
    mutants.SCRIPT: lambda: mutants.texts(mutants.pages_runs(())),
}


def main() -> None:
    """Compares or writes; exits with 1 where pages differ and are not written."""
    parser = argparse.ArgumentParser(description="Tables and figures of the pages, from saved results.")
    parser.add_argument("--write", action="store_true", help="write the pages that differ")
    options = parser.parse_args()
    try:
        changed = {path: new for path, new in generated().items() if new != path.read_text(encoding="utf-8")}
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    stale = {path: figure for path, figure in pictures().items() if not is_current(figure, path)}
    for path, text in changed.items():
        print(path.relative_to(ROOT))
        if options.write:
            path.write_text(text, encoding="utf-8")
    for path, figure in stale.items():
        print(path.relative_to(ROOT))
        if options.write:
            write_svg(figure, path)
    if (changed or stale) and not options.write:
        sys.exit("these pages differ from the saved results: python -m benchmarks.documents --write")


def generated() -> dict[Path, str]:
    """Returns every page as the saved results give it."""
    texts: dict[str, Mapping[str, str]] = {}
    contents = {}
    for name in pages():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        for table, script in TABLE.findall(page):
            if script not in SCRIPTS:
                raise UsageError(f"{name}: no script {script} writes tables: see benchmarks/documents.py")
            if script not in texts:
                texts[script] = SCRIPTS[script]()
            if table not in texts[script]:
                raise UsageError(f"{name}: {script} writes no table {table} from the saved results")
            begin, end = f"<!-- table {table}: written by {script} -->", f"<!-- end of table {table} -->"
            page = filled(page, begin, end, texts[script][table])
        contents[path] = with_figures(page)
    return contents


def pictures() -> "dict[Path, Figure]":
    """Returns the figures of the saved results, by their SVG files."""
    sources = training_report, policies_report, speed_charts, efforts_report, analysis_report, axes
    drawn = {name: figure for source in sources for name, figure in source.pictures().items()}
    return {PICTURES / f"{name}.svg": figure for name, figure in drawn.items()}


def filled(page: str, begin: str, end: str, text: str) -> str:
    """Returns a page with the lines between two markers replaced by a text."""
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UsageError(f"the page has no markers for this text: put {begin} and {end} where it belongs")
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    main()
