"""Regret of dispatch at untuned shapes, with all, half and a quarter of the table.

    python -m benchmarks.dispatch_regret.regret --seconds 400  # measures, prints and writes
    python -m benchmarks.dispatch_regret.regret --load FILE    # prints what was measured; needs no GPU

Shapes are drawn at random (batch, heads, lengths, head dims, masks), and none is in the table. At each shape
several configs are timed in one interleaved run: the winners of all the table's shapes of that head dim, and
the families' defaults. The run also has the neighbours of these. The selected config is compared with the
fastest. An interrupted run has saved its results, and the same command continues it. `python -m
benchmarks.documents --write` puts the tables of the saved runs into the pages.
"""

import argparse
import functools
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.dispatch_regret.analysis import (
    SHARES,
    Figures,
    Point,
    RegretReport,
    dispatched,
    draw_problems,
    figures,
    regret,
)
from benchmarks.saved import decoded, write
from benchmarks.tables import short_title
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target, find_target
from flashtune.db.table import shipped_table
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.cli.output import table

RESULTS = Path("benchmarks/results")
FAMILY = "forward_hopper"
WORST = 10
HEADS = ("median", "95th percentile", "worst")
SCRIPT = "benchmarks/dispatch_regret/regret.py"
# Seeds of the saved runs that did not fit the rule, and the seed with all tables on the page.
JUDGED_SEEDS, HELD_OUT = (2, 3, 4, 5, 6, 7), 7


def main() -> None:
    """Measures or loads, and prints."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = decoded(options.load, RegretReport) if options.load else _measured(options)
        text = "\n".join(_lines(report, _records(find_target(report.target))))
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured is written")
    print(text)


def texts(folder: Path) -> dict[str, str]:
    """The text of each place in the page, by name, of the runs that a folder keeps."""
    paths = {seed: folder / f"nvidia-h200-regret-{seed}.json.gz" for seed in JUDGED_SEEDS}
    kept = {seed: decoded(path, RegretReport) for seed, path in paths.items()}
    records = _records(find_target(kept[HELD_OUT].target))
    return {
        "regret": "\n".join(_lines(kept[HELD_OUT], records)),
        "regret-seeds": "\n".join(_by_seed(list(kept.values()), records)),
    }


def _by_seed(reports: Sequence[RegretReport], records: tuple[Record, ...]) -> Iterator[str]:
    """The regret of dispatch with the shipped table, at the shapes of each seed and of all."""
    choose = functools.partial(dispatched, find_target(reports[0].target))
    everything = tuple(point for report in reports for point in report.points)
    groups = [(str(report.seed), report.points) for report in reports] + [("all", everything)]
    rows = []
    for name, points in groups:
        regrets = figures(points, records, 1.0, choose)
        rows.append((name, str(regrets.points), str(regrets.unknown), *_shares(regrets)))
    yield from table(("seed", "shapes", "not timed", *HEADS), rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Regret of dispatch at untuned shapes.")
    parser.add_argument("--shapes", type=int, default=120, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=400.0, help="limit of the run, compiling included")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--out", type=Path, help="where to write; a name in benchmarks/results if left out")
    parser.add_argument("--load", type=Path, metavar="FILE", help="print what was measured before")
    return parser.parse_args()


def _measured(options: argparse.Namespace) -> RegretReport:
    from benchmarks.dispatch_regret.timing import measure_regret

    until = time.monotonic() + options.seconds
    target = device_target(options.device)
    records = _records(target)
    path = options.out or RESULTS / f"{target.name}-regret.json.gz"
    empty = RegretReport(target.name, options.seed, current_versions(FAMILY), ())
    report = decoded(path, RegretReport) if path.exists() else empty
    if (report.target, report.seed) != (empty.target, empty.seed):
        raise UsageError(f"{path} is of another GPU or seed: name another file by --out")
    problems = draw_problems(options.shapes, options.seed, (record.problem for record in records))
    tell = functools.partial(print, flush=True)
    report = measure_regret(report, problems, records, options.device, until, path, tell)
    write(path, msgspec.json.encode(report))
    return report


def _records(target: Target) -> tuple[Record, ...]:
    table = shipped_table(target.name)
    if table is None:
        raise UsageError(f"no table ships for {target.name}: there is no choice to judge")
    return table.records


def _lines(report: RegretReport, records: tuple[Record, ...]) -> Iterator[str]:
    """Everything in Markdown."""
    choose = functools.partial(dispatched, find_target(report.target))
    versions = report.versions
    yield (
        f"At {len(report.points)} shapes on an {report.target} (torch {versions.torch}, "
        f"Triton {versions.triton}, seed {report.seed}):"
    )
    yield ""
    by_share = {share: figures(report.points, records, share, choose) for share in SHARES}
    yield from table(
        ("anchors", *HEADS),
        (_row(f"{share:.0%} ({regrets.anchors})", regrets) for share, regrets in by_share.items()),
    )
    yield from ("", "With all anchors:", "")
    by_group = {name: figures(points, records, 1.0, choose) for name, points in _groups(report.points)}
    yield from table(
        ("shapes", *HEADS),
        (_row(f"{name} ({regrets.points})", regrets) for name, regrets in by_group.items()),
    )
    yield from ("", f"The {WORST} worst:", "")
    worst = sorted(
        ((regret(point, choose(point.problem, records)) or 0.0, point) for point in report.points),
        key=lambda pair: -pair[0],
    )
    rows = []
    for value, point in worst[:WORST]:
        chosen, best = choose(point.problem, records), point.best
        label, alike = chosen.config.label(), chosen.family == best.family
        ours = f"{chosen.family} {_differs(label, best.config, alike)}"
        fastest = f"{best.family} {_differs(best.config, label, alike)}"
        rows.append((point.problem.key, f"{value:.1%}", ours, fastest))
    yield from table(("shape", "regret", "chosen", "best"), rows)


def _row(name: str, regrets: Figures) -> tuple[str, ...]:
    unknown = f"; {regrets.unknown} not timed" if regrets.unknown else ""
    return f"{name}{unknown}", *_shares(regrets)


def _shares(regrets: Figures) -> Iterator[str]:
    return (f"{share:.1%}" for share in (regrets.median, regrets.p95, regrets.worst))


def _groups(points: Iterable[Point]) -> Iterator[tuple[str, list[Point]]]:
    """Parts of all points that may differ in kind."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(short_title(point.problem), []).append(point)
    for point in points:
        fast = point.best.ms < 0.1
        groups.setdefault("under 0.1 ms" if fast else "0.1 ms and longer", []).append(point)
    yield from sorted(groups.items())


def _differs(label: str, other: str, alike: bool) -> str:
    """The values of a config that another one's label does not have.

    Configs of one family are compared by the axes of both. Saved labels lack axes that were added later.
    """
    values, axes = set(other.split()), {word.partition("=")[0] for word in other.split()}
    differ = (word for word in label.split() if word not in values)
    return " ".join(word for word in differ if not alike or word.partition("=")[0] in axes) or "the same"


if __name__ == "__main__":
    main()
