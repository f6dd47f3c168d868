"""Searches as Optuna studies, rebuilt from their records, and Optuna's own plots of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, OptunaError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from flashtune.core.errors import FlashtuneError, UsageError, quoted
from flashtune.core.record import Outcome, Record
from flashtune.db.location import without_password
from flashtune.tuner.cli.html_report.shape_facts import Json
from flashtune.tuner.cli.html_report.stored_shapes import Shape
from flashtune.tuner.tables.lookup import Found

FAMILY = "family"
# Timed candidates of a family from which its axes can be compared.
LEAST_TRIALS = 8
# Fastest candidates in parallel coordinates: each one is a line.
MAX_LINES = 150


def write_studies(shapes: Iterable[Shape], url: str) -> int:
    """Writes a study for each searched shape to an Optuna storage, and returns the number of studies.

    Raises:
        UsageError: The storage has a study of such a name.
        FlashtuneError: The storage cannot be written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = quoted(without_password(url))
    searched = [(shape.name, candidates) for shape in shapes if (candidates := shape.tried())]
    try:
        storage = optuna.storages.get_storage(url)
        for name, candidates in searched:
            optuna.create_study(study_name=name, storage=storage).add_trials(trials_of(candidates))
    except DuplicatedStudyError as error:
        raise UsageError(f"{where} has a study of these searches already: name a new storage") from error
    except (OptunaError, SQLAlchemyError, ValueError, ImportError) as error:
        raise FlashtuneError(f"cannot write the studies to {where}: {error}") from error
    return len(searched)


def trials_of(candidates: Sequence[Found]) -> list[FrozenTrial]:
    """Returns a trial for each candidate. Its parameters are the axes that have several values.

    With several families, names have the family: `forward_q_outer.block_m`.
    """
    several = len({row.record.family for row in candidates}) > 1
    points = [_point(row.record, several) for row in candidates]
    values: dict[str, set[Any]] = {}
    for point in points:
        for name, value in point.items():
            values.setdefault(name, set()).add(value)
    choices = {name: CategoricalDistribution(sorted(seen)) for name, seen in values.items() if len(seen) > 1}
    return [_trial(row, point, choices) for row, point in zip(candidates, points, strict=True)]


def _point(record: Record, several: bool) -> dict[str, Any]:
    """Returns the values of a record's axes. Optuna takes numbers and texts."""
    assert record.config is not None
    prefix = f"{record.family}." if several else ""
    axes = ((name, getattr(value, "value", value)) for name, value in record.config.items())
    return {FAMILY: record.family} | {prefix + name: value for name, value in axes}


def _trial(row: Found, point: dict[str, Any], choices: dict[str, CategoricalDistribution]) -> FrozenTrial:
    record, resources = row.record, row.record.resources
    is_timed = record.outcome is Outcome.OK and record.ms is not None
    facts = {"record": row.id, "outcome": record.outcome.value, "provenance": record.provenance.value}
    facts |= {"message": record.message} if record.message else {}
    facts |= {"sram_bytes": resources.sram_bytes, "registers": resources.registers} if resources else {}
    # A candidate that does not fit the GPU is pruned. One that failed later is a failed trial.
    failure = TrialState.PRUNED if record.outcome is Outcome.INFEASIBLE else TrialState.FAIL
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE if is_timed else failure,
        value=record.ms if is_timed else None,
        params={name: value for name, value in point.items() if name in choices},
        distributions={name: choices[name] for name in point if name in choices},
        user_attrs=facts,
    )
    stored = datetime.fromisoformat(row.created_at).replace(tzinfo=None)
    trial.datetime_start = trial.datetime_complete = stored
    return trial


def axis_figures(candidates: Sequence[Found]) -> Iterator[Json]:
    """Yields Optuna's plots of the axes of each family: parallel coordinates, and the importance."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    timed = [row for row in candidates if row.record.outcome is Outcome.OK and row.record.ms]
    timed.sort(key=lambda row: row.record.ms or 0.0)
    for family in dict.fromkeys(row.record.family for row in timed):
        trials = trials_of([row for row in timed if row.record.family == family])
        if len(trials) < LEAST_TRIALS or not any(trial.params for trial in trials):
            continue
        study, fastest = optuna.create_study(), optuna.create_study()
        study.add_trials(trials)
        fastest.add_trials(trials[:MAX_LINES])
        # Of functions that Optuna calls experimental, and of equal times.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lines = optuna.visualization.plot_parallel_coordinate(fastest, target_name="ms")
            bars = optuna.visualization.plot_param_importances(study, target_name="ms")
        bars.update_layout(xaxis_title="share of the differences", yaxis_title=None)
        text = f"The {len(fastest.trials)} fastest candidates, each a line through its values."
        yield _facts(f"Parallel coordinates of {family}", text, lines)
        text = "Share of each axis in the differences of time, by Optuna."
        yield _facts(f"Importance of the axes of {family}", text, bars)


def _facts(title: str, text: str, figure: Any) -> Json:
    """Returns a plot for a page. Pages have one style, so the figure's own one is left out."""
    plot = json.loads(figure.update_layout(title=None, template="none").to_json())
    del plot["layout"]["template"]
    return {"title": title, "text": text, **plot}
