"""The table of trials of fleets with faults, from the result of `benchmarks.fleet_trials`."""

import msgspec

from benchmarks.saved import RESULTS, load
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/fleet_report.py"
FILE = RESULTS / "fleet-trials.json.gz"


class TrialRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a trial."""

    fault: str
    moments: int  # How often the fault happened.
    shapes: int
    records: int  # Stored results.
    lost: int  # Results that a process saw stored, and the database lacks.
    doubled: int  # Results that are stored twice.
    timed_twice: int  # Candidates with two times before the finals, or in one run of finals.
    unfinished: int  # Shapes without a selection, and with a queue also those without an ended job.
    seconds: float | None = None  # From the fault until another worker had the job.
    sentence: str = ""


def texts() -> dict[str, str]:
    """The table of docs/fleets.md, by its name."""
    counts = ("times", "shapes", "results", "lost", "stored twice", "timed twice", "unfinished")
    rows = []
    for row in load(FILE, list[TrialRow]).rows:
        numbers = (
            row.moments,
            row.shapes,
            row.records,
            row.lost,
            row.doubled,
            row.timed_twice,
            row.unfinished,
        )
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        rows.append((row.fault, *(f"{number:,}" for number in numbers), seconds))
    return {"trials": "\n".join(table(("fault", *counts, "taken over after"), rows))}
