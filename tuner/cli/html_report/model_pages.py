"""Models of a report: which shapes are theirs, and the curves of their attention over sequence length."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flashtune.core.target import Target
from flashtune.tuner.analysis.model_overview import overviews
from flashtune.tuner.cli.html_report.shape_facts import Json, short
from flashtune.tuner.cli.html_report.stored_shapes import Shape
from flashtune.tuner.cli.report.model_report import PANELS, panels_of
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import ModelAttention
from flashtune.tuner.workloads.presets import MODELS

LENGTHS = "1024|4096|16384|65536"
# Curves of training would take a second for each model: its kernels are rendered for their workspaces.
PHASES = (Phase.PREFILL, Phase.DECODE)


class ReportModel(NamedTuple):
    """A known model that calls shapes of the report."""

    attention: ModelAttention
    shapes: frozenset[str]  # The names of these shapes.
    targets: tuple[Target, ...]  # Their GPUs.


def models_of(shapes: Sequence[Shape]) -> tuple[ReportModel, ...]:
    """Returns the known models that call some of the shapes, by name."""
    owned = ((model, [shape for shape in shapes if model.calls(shape.problem)]) for model in MODELS)
    models = (
        ReportModel(
            model, frozenset(shape.name for shape in own), tuple(dict.fromkeys(shape.target for shape in own))
        )
        for model, own in owned
        if own
    )
    return tuple(sorted(models, key=lambda model: model.attention.name))


def curves(models: Iterable[ReportModel], db: str | None) -> Iterator[tuple[str, Json]]:
    """Yields the name of each model and its facts, with curves for each GPU and phase."""
    for attention, _, targets in models:
        sets = [
            {
                "title": f"{overview.phase.value} on {overview.target}",
                "tokens": [point.seqlen for point in overview.points],
                "panels": [
                    [title, {name: list(map(short, values)) for name, values in lines.items()}]
                    for title, lines in zip(PANELS, panels_of(overview.points), strict=True)
                ],
            }
            for target in targets
            for phase in (PHASES if attention.causal else PHASES[:1])
            for overview in overviews(attention, ModelSizes(phase, LENGTHS), target, db)
        ]
        yield attention.name, {"layers": attention.layers, "sets": sets}
