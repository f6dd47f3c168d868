"""Rows of tabular benchmarks, from the results of compilation and measurement."""

from typing import NamedTuple

import msgspec

from benchmarks.exhaustive.jobs import Described
from benchmarks.exhaustive.truth_table import Row, Sampled, rounded, values_of
from flashtune.core.record import Measurement, Resources
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.evaluation import Evaluation

MAX_MESSAGE = 100


class Ready(NamedTuple):
    """A candidate, and the result of its compilation."""

    candidate: Candidate
    described: Described


def row_of(ready: Ready, evaluation: Evaluation | None, batch: int) -> Row:
    """The outcome of a candidate; `evaluation` is None if it did not compile or does not fit."""
    compiled = ready.described.compiled
    return Row(
        values=values_of(ready.candidate.config),
        outcome=evaluation.outcome if evaluation else compiled.outcome,
        message=(evaluation.message if evaluation else compiled.message)[:MAX_MESSAGE],
        resources=_brief(compiled.resources),
        loop=ready.described.loop,
        batch=batch,
        first=sampled(evaluation.measurement) if evaluation and evaluation.measurement else None,
    )


def sampled(measurement: Measurement) -> Sampled:
    """A measurement as a row keeps it."""
    ms, p20, p80 = map(rounded, (measurement.ms, measurement.p20, measurement.p80))
    return Sampled(ms, p20, p80, measurement.samples)


def _brief(resources: Resources | None) -> Resources | None:
    if resources is None:
        return None
    return msgspec.structs.replace(resources, compile_seconds=round(resources.compile_seconds, 3))
