"""Tables and charts of measurements of training, from benchmarks/results.

`python -m benchmarks.documents --write` puts them into docs/. The input files are those that
`benchmarks.training.memory`, `examples.training` and `benchmarks.kernels.dropout` write with `--save`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from benchmarks.kernels import dropout
from benchmarks.saved import RESULTS, decoded
from benchmarks.tables import short_title
from benchmarks.training import memory as training_memory
from benchmarks.training.charts import losses_picture, memory_picture
from benchmarks.training.memory import GIB, OURS, Peak
from examples.training import report as example
from flashtune.tuner.cli.output import table
from flashtune.tuner.workloads.shapes import parse_shape

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCRIPT = "benchmarks/training/report.py"
MIB = 2**20


class Step(msgspec.Struct, frozen=True):
    """Host time of one implementation, in us: forward, both passes, and both over SDPA's."""

    name: str
    forward_us: float
    both_us: float
    over_sdpa: float


class Steps(msgspec.Struct, frozen=True):
    """Host times of training steps."""

    gpu: str
    torch: str
    triton: str
    rows: tuple[Step, ...]


def saved_memory() -> training_memory.Document:
    """Returns the saved measurement of memory."""
    return decoded(RESULTS / "nvidia-h200-training-memory.json.gz", training_memory.Document)


def saved_example() -> example.Document:
    """Returns the saved run of the example."""
    return decoded(RESULTS / "nvidia-h200-training.json.gz", example.Document)


def texts() -> dict[str, str]:
    """Returns the tables by name."""
    dropped = decoded(RESULTS / "nvidia-h200-dropout.json.gz", tuple[dropout.Row, ...])
    steps = decoded(RESULTS / "nvidia-h200-training-step.json.gz", Steps)
    lines = {
        "memory": _memory(saved_memory()),
        "example": _example(saved_example()),
        "dropout": _dropout(dropped),
        "host": _host(steps),
    }
    return {name: "\n".join(each) for name, each in lines.items()}


def pictures() -> "dict[str, Figure]":
    """Returns the figures by name."""
    memory, losses = memory_picture(saved_memory()), losses_picture(saved_example())
    return {"training-memory": memory, "training-losses": losses}


def _memory(document: training_memory.Document) -> Iterator[str]:
    """Ratios by length, then by family."""
    names = list(dict.fromkeys(peak.name for row in document.rows for peak in row.peaks))
    yield f"Peak of a forward and a backward pass over what is held in any case ({_where(document)}):"
    yield ""
    lines = (
        (
            f"{row.seqlen:,}",
            _size(row.held),
            *(_cell(peak) for name in names for peak in row.peaks if peak.name == name),
        )
        for row in document.rows
    )
    yield from table(("tokens", "held", *names), lines)
    yield ""
    row = document.families
    yield f"Each family's kernels of the backward pass alone, {row.seqlen:,} tokens, {_size(row.held)} held:"
    yield ""
    yield from table(
        ("family", "peak", "over held"), ((f"`{peak.name}`", *_sized(peak)) for peak in row.peaks)
    )


def _where(document: training_memory.Document) -> str:
    versions = document.versions
    return f"{document.gpu}, torch {versions.torch}, Triton {versions.triton}, driver {versions.driver}"


def _size(size: int) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def _cell(peak: Peak) -> str:
    return peak.message if peak.over_held is None else f"{peak.over_held:.3f}"


def _sized(peak: Peak) -> tuple[str, str]:
    return "–" if peak.bytes is None else _size(peak.bytes), _cell(peak)


def _example(document: example.Document) -> Iterator[str]:
    setting = document.setting
    size, steps = f"{document.parameters / 1e6:.0f} million parameters", f"{setting.steps} steps"
    where = f"{document.device}, torch {document.torch}, Triton {document.triton}"
    yield f"{size}, {steps} of {setting.batch} sequences ({where}):"
    yield ""
    first = document.runs[0]
    heads = (
        "way",
        "step, ms",
        "over SDPA",
        "peak, GiB",
        "last loss",
        f"largest difference from {first.name}'s losses",
    )
    lines = (
        (
            run.name,
            f"{example.median_ms(run):.2f}",
            f"{example.median_ms(run) / example.median_ms(first):.3f}",
            f"{run.peak_bytes / GIB:.2f}",
            f"{run.losses[-1]:.4f}",
            "" if run is first else f"{example.difference(run, first):.3f}",
        )
        for run in document.runs
    )
    yield from table(heads, lines)
    yield ""
    yield f"The entropy of the data, the lowest possible loss, is {document.floor:.4f}."


def _dropout(rows: tuple[dropout.Row, ...]) -> Iterator[str]:
    yield "Milliseconds of both passes, and what dropping adds to the time of each:"
    yield ""
    heads = ("", OURS, "SDPA's flash backend", "ratio", "ratio without dropout", "added to ours", "to theirs")
    lines = (
        (
            _title(row.shape),
            f"{row.ours:.2f}",
            f"{row.theirs:.2f}",
            f"{row.share:.2f}",
            f"{row.ours_without / row.theirs_without:.2f}",
            f"{row.ours / row.ours_without - 1:.0%}",
            f"{row.theirs / row.theirs_without - 1:.0%}",
        )
        for row in rows
    )
    yield from table(heads, lines)


def _host(steps: Steps) -> Iterator[str]:
    where = f"{steps.gpu}, torch {steps.torch}, Triton {steps.triton}"
    yield f"Microseconds of the host, medians in turn ({where}):"
    yield ""
    lines = (
        (row.name, f"{row.forward_us:.1f}", f"{row.both_us:.1f}", f"{row.over_sdpa:.2f}")
        for row in steps.rows
    )
    yield from table(("way", "forward", "both passes", "both over SDPA"), lines)


def _title(shape: str) -> str:
    problem = parse_shape(shape)[0]
    return f"{short_title(problem)}, S={problem.seqlen_kv}"
