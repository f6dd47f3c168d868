"""What many benches say together: speed over each peer, and standing among figures measured elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from flashtune.tuner.bench_grid import PeerFile, case_of
from flashtune.tuner.bench_peers import CUDNN
from flashtune.tuner.bench_records import OURS, Bench

ANY_PEER = "best peer"


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ratio at one problem; above 1 we are faster."""

    problem: str
    ratio: float


class Ratios(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our speed over a peer's, over all problems at which both have a row.

    Attributes:
        peer: The peer's name, or `best peer`: whichever is fastest at each problem.
        points: One for each problem.
        geometric_mean: Of all of them.
        worst: The smallest of them.
    """

    peer: str
    points: tuple[Point, ...]
    geometric_mean: float
    worst: Point


class AgainstPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where we stand at one case among peers that were measured elsewhere.

    Both runs hold cuDNN, which is the yardstick between them.

    Attributes:
        case: The case's name in the file.
        ours: Our speed over cuDNN's, in this run.
        best: The fastest peer of the file.
        theirs: Its speed over cuDNN's, in the file.
    """

    case: str
    ours: float
    best: str
    theirs: float

    @property
    def ratio(self) -> float:
        """Our speed over the best peer's, both in units of cuDNN's."""
        return self.ours / self.theirs


class Against(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our standing among figures measured elsewhere.

    Attributes:
        source: Where they come from.
        points: One for each problem of this run that the file knows.
        geometric_mean: Of the points' ratios.
        worst: The point of the smallest ratio.
    """

    source: str
    points: tuple[AgainstPoint, ...]
    geometric_mean: float
    worst: AgainstPoint


def ratios(benches: Sequence[Bench]) -> tuple[Ratios, ...]:
    """Our speed over the best peer's, and over each peer's; none where we have no row."""
    found: dict[str, list[Point]] = {ANY_PEER: []}
    for bench in benches:
        ours = bench.row(OURS)
        peers = [row for row in bench.rows if row.name != OURS]
        if ours is None or not peers:
            continue
        for name, ms in ((ANY_PEER, min(row.ms for row in peers)), *((row.name, row.ms) for row in peers)):
            found.setdefault(name, []).append(Point(bench.problem.key, ms / ours.ms))
    return tuple(
        Ratios(
            name,
            tuple(points),
            statistics.geometric_mean([point.ratio for point in points]),
            min(points, key=lambda point: point.ratio),
        )
        for name, points in found.items()
        if points
    )


def against(benches: Sequence[Bench], file: PeerFile) -> Against | None:
    """Where the benches stand among a file's figures; None where they share no case."""
    known = {figures.case: figures for figures in file.cases}
    points = []
    for bench in benches:
        case = case_of(bench.problem)
        ours, cudnn = bench.row(OURS), bench.row(CUDNN)
        if case not in known or ours is None or cudnn is None:
            continue
        name, speed = known[case].best()
        points.append(AgainstPoint(case, cudnn.ms / ours.ms, name, speed / known[case].cudnn))
    if not points:
        return None
    mean = statistics.geometric_mean([point.ratio for point in points])
    return Against(file.source, tuple(points), mean, min(points, key=lambda point: point.ratio))
