"""Tabular benchmarks: results of every config of a space on one GPU, for searches without one.

A table holds one family's configs for one problem: the whole space, or a uniform sample. It is a file of
compressed JSON.
"""

import enum
import functools
import hashlib
import lzma
import statistics
from pathlib import Path

import msgspec

from benchmarks.exhaustive.inner_loop import Loop
from benchmarks.saved import write
from flashtune.core.config import AxisValue, Config
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Milliseconds, NonNegative, Outcome, PeerTime, Resources, ShortText, Versions
from flashtune.templates.registry import family_names, find_family
from flashtune.tuner.candidates import Candidate, SearchTask, demand

SUFFIX = ".json.xz"
# Digits of stored times, in milliseconds: a tenth of the resolution of the GPU's timer.
DIGITS = 5


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """Time of a kernel, in ms: median, 20th and 80th percentile, and the number of samples."""

    ms: Milliseconds
    p20: Milliseconds
    p80: Milliseconds
    samples: NonNegative


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The result of one config."""

    values: tuple[int | bool | str, ...]  # The config's fields, in the table's order.
    outcome: Outcome
    message: ShortText = ""  # The reason if it is not `ok`.
    resources: Resources | None = None  # The compiler's report, if it compiled.
    loop: Loop | None = None  # The inner loop of its machine code, if it was found.
    batch: NonNegative = 0  # Number of the batch in which it was timed. Batches drift apart.
    first: Sampled | None = None  # Its time in that batch.
    final: Sampled | None = None  # Its time in the final measurement, if it was part of it.


class TruthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Results of one family's configs for one problem on one GPU."""

    problem: Problem
    target: ShortText  # The GPU.
    family: ShortText  # The configs' family.
    versions: Versions  # Versions of the measurement.
    space: NonNegative  # Number of points of the family's space for this problem.
    # Number of these that fit the target by the SRAM model. Rows are drawn from these.
    fitting: NonNegative
    drawn: NonNegative  # Number of configs to measure: the first in the order of a seeded hash.
    seed: NonNegative  # The seed of that order.
    seconds: float  # Wall clock time of the run.
    jobs: NonNegative  # Compiler processes in addition to the measuring one.
    # Time of the family's default in each batch, in ms, which shows the drift.
    anchors: tuple[Milliseconds, ...]
    peers: tuple[PeerTime, ...]  # Other implementations, interleaved in the final measurement.
    fields: tuple[ShortText, ...]  # Names of the configs' fields.
    # Results in order of completion, fewer than `drawn` if the run was interrupted.
    rows: tuple[Row, ...]

    @property
    def is_cut(self) -> bool:
        """Returns whether the run ended before all drawn configs were measured."""
        return len(self.rows) < self.drawn

    @property
    def is_whole(self) -> bool:
        """Returns whether the table holds every config that fits."""
        return len(self.rows) == self.fitting

    def candidate(self, row: Row) -> Candidate:
        """Returns the candidate of a row."""
        if self.family not in family_names():
            raise TableError(f"a truth table is of an unknown family {self.family[:40]!r}")
        values = dict(zip(self.fields, row.values, strict=False))
        try:
            config = msgspec.convert(values, find_family(self.family).config_type)
        except msgspec.ValidationError as error:
            raise TableError(
                f"a truth table of {self.family} holds a config that is none: {error}"
            ) from error
        return Candidate(self.family, config)

    def first_times(self) -> tuple[float | None, ...]:
        """Returns each row's time in its batch, in ms, with the default's time equal in all batches."""
        median = statistics.median(self.anchors) if self.anchors else 1.0
        return tuple(
            row.first.ms * median / self.anchors[row.batch] if row.first else None for row in self.rows
        )

    def times(self) -> tuple[float | None, ...]:
        """Returns the best estimate of each row's time, in ms: measured in the finals, or scaled to them.

        If only the fastest kernels are interleaved, the GPU is hotter and its clock lower than in mixed
        batches.
        """
        first = self.first_times()
        ratios = [row.final.ms / ms for row, ms in zip(self.rows, first, strict=True) if row.final and ms]
        hotter = statistics.median(ratios) if ratios else 1.0
        return tuple(
            row.final.ms if row.final else ms and ms * hotter
            for row, ms in zip(self.rows, first, strict=True)
        )


def draw(scope: SearchTask, count: int | None, seed: int) -> tuple[int, tuple[Candidate, ...]]:
    """Returns the number of candidates that fit by the SRAM model, and these in a uniform order.

    The order is that of a seeded hash of the config alone. Draws for several problems thus hold the same
    configs wherever their spaces do. At most `count` are returned, or all if it is None.
    """
    fitting = [candidate for candidate in scope.candidates() if not demand(scope, candidate).excess]
    ordered = sorted(fitting, key=functools.partial(_ticket, seed))
    return len(fitting), tuple(ordered[:count])


def _ticket(seed: int, candidate: Candidate) -> bytes:
    return hashlib.sha256(msgspec.json.encode((seed, candidate.family, candidate.config))).digest()


def values_of(config: Config) -> tuple[int | bool | str, ...]:
    """Returns a config's fields as a row stores them."""
    return tuple(_plain(value) for _, value in config.items())


def _plain(value: AxisValue) -> int | bool | str:
    return str(value.value) if isinstance(value, enum.Enum) else value


def rounded(milliseconds: float) -> float:
    """Returns a time without insignificant digits."""
    return round(milliseconds, DIGITS)


def write_table(table: TruthTable, path: Path) -> None:
    """Writes a table atomically."""
    write(path, lzma.compress(msgspec.json.encode(table), preset=9))


def read_table(path: Path) -> TruthTable:
    """Returns the table of a file."""
    try:
        table = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=TruthTable)
    except (OSError, lzma.LZMAError, msgspec.DecodeError) as error:
        raise TableError(f"{path} is no truth table: {error}") from error
    for row in table.rows:
        table.candidate(row)
    return table


def read_tables(folder: Path) -> tuple[TruthTable, ...]:
    """Returns all tables of a folder, in the order of their names."""
    return tuple(read_table(path) for path in sorted(folder.glob(f"*{SUFFIX}")))


def file_name(target: str, family: str, problem: Problem) -> str:
    """Returns the name of a table's file."""
    return f"{target}-{family}-{problem.key}{SUFFIX}"


def fastest(table: TruthTable) -> float:
    """Returns the best time of a table, in ms."""
    times = [ms for ms in table.times() if ms is not None]
    if not times:
        raise TableError(f"nothing works in the truth table of {table.problem.key}")
    return min(times)
