"""Tables of searches on the GPU: their stability, and the times of other tuners.

    python -m benchmarks.search.report  # prints them, from benchmarks/results

`python -m benchmarks.documents --write` puts them into docs/search.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from benchmarks.saved import RESULTS
from benchmarks.search import autotune
from benchmarks.search.stability import Stability
from benchmarks.search_replay.policies_report import problem_title
from flashtune.core.errors import TableError
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/search/report.py"

Read = TypeVar("Read")


class Helion(msgspec.Struct, frozen=True):
    """A row of `benchmarks.search.against_helion`, which needs Helion to be imported."""

    problem: str
    effort: str
    budget: int | None
    helion: str
    search_seconds: float
    search_ms: float
    helion_seconds: float
    helion_ms: float


def main() -> None:
    """Prints the tables."""
    try:
        for name, text in texts().items():
            print(f"## {name}\n\n{text}\n")
    except TableError as error:
        sys.exit(f"error: {error}")


def texts() -> dict[str, str]:
    """The text of each place in the page, by name.

    Raises:
        TableError: A file is missing, or holds something else.
    """
    return {
        "stability": "\n".join(_stability(_read("stability-thrice", tuple[Stability, ...]))),
        "autotune": "\n".join(_autotune(_read("autotune", tuple[autotune.Comparison, ...]))),
        "helion": "\n".join(_helion(_read("helion", Helion))),
    }


def _read(name: str, kind: type[Read]) -> Read:
    path = RESULTS / f"nvidia-h200-{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path} holds no such measurement: {error}") from error


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
            problem_title(one.problem),
            ", ".join(f"{seconds:.0f}" for seconds in one.seconds),
            _letters(one.picks),
            f"{one.cost(one.picks):.2%}",
            "–" if one.share is None else f"{one.share:.3f}",
            _letters(one.halves),
            f"{one.cost((one.picks[0], *one.halves)):.2%}",
        )
        for one in searched
    )
    yield from table(heads, rows)


def _letters(numbers: tuple[int, ...]) -> str:
    return " ".join("ABCDEFGH"[number] for number in numbers)


def _autotune(compared: tuple[autotune.Comparison, ...]) -> Iterator[str]:
    heads = ("shape, 16k tokens", "`triton.autotune`", "search", "time over that for all", "speed over its")
    rows = (
        (
            problem_title(one.problem),
            f"{one.autotune_tried} of {one.configs} configs in {one.autotune_seconds:.0f} s",
            f"{one.search_seconds:.1f} s",
            f"{one.search_seconds / one.whole_seconds:.3f}",
            f"{one.autotune_ms / one.search_ms:.3f}",
        )
        for one in compared
    )
    yield from table(heads, rows)


def _helion(one: Helion) -> Iterator[str]:
    name = f"Helion {one.helion}, {one.effort} effort"
    heads = ("shape, 16k tokens", name, "search", "time over its", "speed over its")
    row = (
        problem_title(one.problem),
        f"{one.helion_seconds:.0f} s, {one.helion_ms:.3f} ms",
        f"{one.search_seconds:.0f} s, {one.search_ms:.3f} ms",
        f"{one.search_seconds / one.helion_seconds:.2f}",
        f"{one.helion_ms / one.search_ms:.2f}",
    )
    yield from table(heads, (row,))


if __name__ == "__main__":
    main()
