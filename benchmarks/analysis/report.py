"""Tables and pictures of docs/analysis.md.

They are computed, apart from the crossover length on a GPU and the use of caches by a recorded trace, which
have saved results. Without a saved crossover, the page says how to measure it.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.saved import RESULTS, load, run_of
from benchmarks.training.memory import OURS, UNFUSED
from benchmarks.training.report import saved_memory
from flashtune.core.target import find_target
from flashtune.tuner.analysis.cache_use import cache_use, synthetic_trace
from flashtune.tuner.analysis.charts import Chart
from flashtune.tuner.analysis.crossover import FASTER_FROM, crossover
from flashtune.tuner.analysis.intensity import intensity
from flashtune.tuner.analysis.memory_levels import memory_levels
from flashtune.tuner.analysis.sram_table import sram_charts
from flashtune.tuner.analysis.training_memory import peaks, training_memory
from flashtune.tuner.bench.results import BenchRun
from flashtune.tuner.cli.output import table
from flashtune.tuner.cli.report.chart_report import cells, charts_figure
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import LayerCall
from flashtune.tuner.workloads.presets import find_model
from flashtune.tuner.workloads.shapes import parse_shape

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCRIPT = "benchmarks/analysis/report.py"
CROSSOVER = RESULTS / "nvidia-h200-crossover.json.gz"
TRACE = RESULTS / "azure-conversations-cache-use.json.gz"
H200, H100 = find_target("h200"), find_target("h100")
# No database: pages depend on the shipped tables only.
NO_DATABASE = str(Path(tempfile.gettempdir()) / "flashtune-no-such-database.sqlite")
PAGE_SIZES = (16, 32, 64, 128, 256)


@functools.cache
def charts() -> Mapping[str, Sequence[Chart]]:
    """Returns the charts of the page, by the names of their pictures and tables."""
    decoding = "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=128..65536,head_dim=128"
    shapes = (
        *parse_shape("heads=32,kv_heads=8,seqlen=128..65536,head_dim=128,causal"),
        *parse_shape(decoding),
    )
    tiles = parse_shape("heads=16,seqlen=4096,head_dim=64|128|256")
    sizes = ModelSizes(Phase.TRAINING, "1024..65536")
    synthetic = synthetic_trace(400, 20.0, 400, 150, 0)
    return {
        "intensity": intensity(shapes, H200, NO_DATABASE),
        "memory-levels": memory_levels(),
        "sram": sram_charts(tiles, H100, ("forward_hopper", "forward_q_outer")),
        "training": training_memory(find_model("llama-3.1-8b"), sizes, H200, NO_DATABASE),
        "synthetic-requests": cache_use("400 synthetic requests", synthetic, 32_768, PAGE_SIZES, 0.02),
        "recorded-requests": load(TRACE, tuple[Chart, ...]).rows,
    }


def measured_crossover() -> tuple[Chart, ...]:
    """Returns the charts of the saved measurement, none without one."""
    if not CROSSOVER.is_file():
        return ()
    run = load(CROSSOVER, BenchRun).rows
    return crossover(run.times(UNFUSED), f"measured on {run.environment.gpu}")


def pictures() -> "dict[str, Figure]":
    """Returns the figures by name."""
    measured = {"crossover": found} if (found := measured_crossover()) else {}
    return {
        f"analysis-{name}": charts_figure(list(map(_rounded, each)))
        for name, each in {**charts(), **measured}.items()
    }


def _rounded(chart: Chart) -> Chart:
    """Returns a chart with values that are equal on all machines."""
    lines = {
        name: tuple(None if value is None else float(f"{value:.6g}") for value in values)
        for name, values in chart.lines.items()
    }
    return msgspec.structs.replace(chart, lines=lines)


def texts() -> dict[str, str]:
    """Returns the tables by name."""
    found = charts()
    written = {
        f"analysis-{name}": _requests(each) if name.endswith("requests") else _tables(each)
        for name, each in found.items()
    }
    written["analysis-layer"] = _layer()
    written["analysis-sources"] = "\n".join(
        f"- {chart.title}, {name}: {value}."
        for chart in memory_levels()
        for name, value in chart.notes.items()
    )
    written["analysis-crossover"] = crossover_text()
    return written


def _tables(found: Sequence[Chart]) -> str:
    """Returns charts as tables of Markdown."""
    parts = []
    for chart in found:
        limits = "".join(f"; {name}: {value:,.0f}" for name, value in chart.limits.items())
        parts.append(f"{chart.title}, {chart.unit}{limits}:\n")
        parts += [*table((chart.across, *chart.lines), cells(chart)), ""]
    return "\n".join(parts).rstrip("\n")


def _requests(found: Sequence[Chart]) -> str:
    """Returns the charts of one trace as one table."""
    heads = (f"{name}, {chart.unit}" for chart in found for name in chart.lines)
    columns = [list(zip(*cells(chart), strict=True))[1:] for chart in found]
    rows = zip(found[0].positions, *(column for each in columns for column in each), strict=True)
    notes = ", ".join(f"{name}: {value:,}" for name, value in found[0].notes.items())
    return "\n".join((f"{found[0].title.partition(', ')[2]}, {notes}:", "", *table(("cache", *heads), rows)))


def _layer() -> str:
    """Returns the modelled memory of one layer and the measured one."""
    measured = saved_memory()
    rows = []
    for row in measured.rows:
        (problem,) = parse_shape(f"heads=16,seqlen={row.seqlen},head_dim=128,causal")
        unfused, _, kernels = peaks((LayerCall(problem, 1),), H200, NO_DATABASE)
        # Unfused attention keeps copies of queries and keys. The caller holds the originals.
        held = {UNFUSED: unfused + row.held // 4, OURS: kernels}
        for peak in row.peaks:
            if peak.name in held and peak.bytes is not None:
                ratio = f"{held[peak.name] / peak.bytes:.3f}"
                rows.append((f"{row.seqlen:,}", peak.name, f"{peak.bytes / 2**20:,.0f}", ratio))
    return "\n".join(table(("tokens", "attention", "measured, MiB", "model over measured"), rows))


def crossover_text() -> str:
    """Returns the crossover lengths, with a link to the picture, or the command that measures them."""
    found = measured_crossover()
    if not found:
        return (
            "No measurement is saved. On a GPU, `python -m benchmarks.analysis.crossover --save FILE` makes "
            "it. Then `python -m benchmarks.documents --write` adds it here."
        )
    source = load(CROSSOVER, BenchRun).source
    rows = ((chart.title.partition(",")[0], str(chart.notes[FASTER_FROM])) for chart in found)
    lines = table(("shape", FASTER_FROM), rows)
    picture = "![Times of unfused and of fused attention over length](pictures/analysis-crossover.svg)"
    return "\n".join((picture, "", f"{run_of(source)}:", "", *lines))
