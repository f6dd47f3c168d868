"""Tables of searches on the GPU: their stability, and the times of other tuners.

`python -m benchmarks.documents --write` puts them into docs/search.md. benchmarks/results/README.md names the
scripts that measured them.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from benchmarks.saved import RESULTS, decoded
from benchmarks.search_replay.policies_report import problem_title
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/search_report.py"

Rows = TypeVar("Rows")


class Stability(msgspec.Struct, frozen=True):
    """Repeated searches of one shape."""

    problem: str  # The problem's key.
    # Number of the config that each search chose; equal numbers are the same config.
    picks: tuple[int, ...]
    halves: tuple[int, ...]  # Number of the config that each half of the samples chose.
    # Number of the config that the shipped table has for the problem; None where it has none.
    shipped: int | None
    ms: tuple[float, ...]  # Time of each config that has a number, all timed in turn.
    seconds: tuple[float, ...]  # Wall clock of each search.

    def cost(self, numbers: Sequence[int]) -> float:
        """Returns the loss of the slowest of some selections against the fastest, as a share."""
        times = [self.ms[number] for number in numbers]
        return max(times) / min(times) - 1

    @property
    def share(self) -> float | None:
        """Speed of the first search's pick over the shipped config's; None where none ships."""
        return None if self.shipped is None else self.ms[self.shipped] / self.ms[self.picks[0]]


class Autotune(msgspec.Struct, frozen=True):
    """One shape by a search and by `triton.autotune`."""

    problem: str  # The problem's key.
    configs: int  # Number of configs.
    search_seconds: float  # Wall clock of the search with its final measurement.
    search_ms: float  # Time of its result, interleaved with the other's.
    autotune_seconds: float  # Wall clock of `triton.autotune`.
    autotune_tried: int  # Number of configs that it timed.
    autotune_ms: float  # Time of its result.

    @property
    def whole_seconds(self) -> float:
        """The time of `triton.autotune` for all configs: measured, or extrapolated."""
        return self.autotune_seconds * self.configs / max(1, self.autotune_tried)


class Helion(msgspec.Struct, frozen=True):
    """One shape by a search and by Helion."""

    problem: str  # The problem's key.
    effort: str  # Helion's effort level.
    budget: int | None  # Its time limit in seconds; None for no limit.
    helion: str  # Its version.
    # Wall clock until each result, and the interleaved times of the results.
    search_seconds: float
    search_ms: float
    helion_seconds: float
    helion_ms: float


def texts() -> dict[str, str]:
    """The text of each place in the page, by name."""
    return {
        "stability": "\n".join(_stability(_rows("stability-thrice", tuple[Stability, ...]))),
        "autotune": "\n".join(_autotune(_rows("autotune", tuple[Autotune, ...]))),
        "helion": "\n".join(_helion(_rows("helion", Helion))),
    }


def _rows(name: str, kind: type[Rows]) -> Rows:
    return decoded(RESULTS / f"nvidia-h200-{name}.json.gz", kind)


def _stability(searched: tuple[Stability, ...]) -> Iterator[str]:
    """A line for each shape; equal letters are equal configs."""
    heads = (
        "shape, 16k tokens",
        "seconds of the searches",
        "their picks",
        "the slowest costs",
        "first pick's speed over what ships",
        "picks from half as many samples",
        "the slowest costs",
    )
    rows = (
        (
            problem_title(row.problem),
            ", ".join(f"{seconds:.0f}" for seconds in row.seconds),
            _letters(row.picks),
            f"{row.cost(row.picks):.2%}",
            "–" if row.share is None else f"{row.share:.3f}",
            _letters(row.halves),
            f"{row.cost((row.picks[0], *row.halves)):.2%}",
        )
        for row in searched
    )
    yield from table(heads, rows)


def _letters(numbers: tuple[int, ...]) -> str:
    return " ".join("ABCDEFGH"[number] for number in numbers)


def _autotune(compared: tuple[Autotune, ...]) -> Iterator[str]:
    heads = ("shape, 16k tokens", "`triton.autotune`", "search", "time over that for all", "speed over its")
    rows = (
        (
            problem_title(row.problem),
            f"{row.autotune_tried} of {row.configs} configs in {row.autotune_seconds:.0f} s",
            f"{row.search_seconds:.1f} s",
            f"{row.search_seconds / row.whole_seconds:.3f}",
            f"{row.autotune_ms / row.search_ms:.3f}",
        )
        for row in compared
    )
    yield from table(heads, rows)


def _helion(row: Helion) -> Iterator[str]:
    name = f"Helion {row.helion}, {row.effort} effort"
    heads = ("shape, 16k tokens", name, "search", "time over its", "speed over its")
    cells = (
        problem_title(row.problem),
        f"{row.helion_seconds:.0f} s, {row.helion_ms:.3f} ms",
        f"{row.search_seconds:.0f} s, {row.search_ms:.3f} ms",
        f"{row.search_seconds / row.helion_seconds:.2f}",
        f"{row.helion_ms / row.search_ms:.2f}",
    )
    yield from table(heads, (cells,))
