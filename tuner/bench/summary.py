"""Summaries of several benches: speed over each baseline, and over figures measured elsewhere."""

import statistics
from collections.abc import Sequence

import msgspec

from flashtune.tuner.bench.grids import Figures, PeerFile, case_of
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.bench.results import OURS, Bench, BenchRun, speed_of
from flashtune.tuner.workloads.work import is_decode, kv_bytes

ANY_PEER = "best peer"


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our relative speed at one problem. Above 1 we are faster."""

    problem: str
    ratio: float


class Ratios(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our speed over a baseline's, over all problems at which both have a row."""

    peer: str  # The baseline's name, or `best peer` for the fastest baseline at each problem.
    points: tuple[Point, ...]  # One for each problem.
    geometric_mean: float  # Mean of all points.
    worst: Point  # The smallest point.


class AgainstPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our speed at one case compared with baselines measured elsewhere."""

    case: str  # The case's name in the file.
    seqlen: int  # Number of its keys.
    # Our speed in this run, over cuDNN's in this run unless the file's figures are absolute.
    ours: float
    best: str  # The fastest baseline of the file.
    theirs: float  # Its speed in the file, in the same unit.

    @property
    def ratio(self) -> float:
        """Returns our speed over the best baseline's."""
        return self.ours / self.theirs


class Against(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Comparison with figures measured elsewhere."""

    source: str  # Origin of the figures.
    # Whether speeds are in the unit of their case. If not, each is divided by cuDNN's of its own run.
    absolute: bool
    points: tuple[AgainstPoint, ...]  # One for each problem of this run that the file contains.
    geometric_mean: float  # Mean of the points' ratios.
    worst: AgainstPoint  # The point with the smallest ratio.

    def worst_by_length(self) -> tuple[AgainstPoint, ...]:
        """Returns the point with the smallest ratio for each sequence length, shortest first."""
        lengths = sorted({point.seqlen for point in self.points})
        return tuple(_worst([point for point in self.points if point.seqlen == length]) for length in lengths)


def ratios(benches: Sequence[Bench]) -> tuple[Ratios, ...]:
    """Returns our speed over the best baseline's and over each baseline's; none without our row."""
    by_peer: dict[str, list[Point]] = {ANY_PEER: []}
    for bench in benches:
        ours = bench.row(OURS)
        peers = [row for row in bench.rows if row.name != OURS]
        if ours is None or not peers:
            continue
        for name, ms in ((ANY_PEER, min(row.ms for row in peers)), *((row.name, row.ms) for row in peers)):
            by_peer.setdefault(name, []).append(Point(bench.problem.key, ms / ours.ms))
    return tuple(
        Ratios(
            name,
            tuple(points),
            statistics.geometric_mean([point.ratio for point in points]),
            min(points, key=lambda point: point.ratio),
        )
        for name, points in by_peer.items()
        if points
    )


def against(benches: Sequence[Bench], file: PeerFile) -> Against | None:
    """Compares the benches with a file's figures; None if they share no case."""
    by_case = {figures.case: figures for figures in file.cases}
    points = []
    for bench in benches:
        figures = by_case.get(case_of(bench.problem))
        point = _point(bench, figures, file.absolute) if figures else None
        if point is not None:
            points.append(point)
    if not points:
        return None
    mean = statistics.geometric_mean([point.ratio for point in points])
    return Against(file.source, file.absolute, tuple(points), mean, _worst(points))


def _point(bench: Bench, figures: Figures, absolute: bool) -> AgainstPoint | None:
    """Returns one case, None if a required row is missing."""
    ours, cudnn = bench.row(OURS), bench.row(CUDNN)
    best, speed = figures.best()
    keys = bench.problem.seqlen_kv
    if ours is None:
        return None
    if absolute:
        return AgainstPoint(figures.case, keys, speed_of(bench.problem, ours), best, speed)
    if cudnn is None:
        return None
    return AgainstPoint(figures.case, keys, cudnn.ms / ours.ms, best, speed / figures.cudnn)


class OfCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read speed of keys and values with one query for each head."""

    case: str  # The problem's case.
    gbps: float  # GB/s of keys and values.
    # The speed over that of a plain copy of device memory in the same run, reads and writes together.
    share: float


def of_copy(run: BenchRun) -> tuple[OfCopy, ...]:
    """Returns our read speeds in decoding; none if no copy was timed."""
    comparisons = []
    for bench in run.benches:
        ours = bench.row(OURS)
        if ours is not None and is_decode(bench.problem) and run.copy is not None:
            gbps = kv_bytes(bench.problem) / ours.ms / 1e6
            comparisons.append(OfCopy(case_of(bench.problem), gbps, gbps / run.copy.gbps))
    return tuple(comparisons)


def _worst(points: Sequence[AgainstPoint]) -> AgainstPoint:
    return min(points, key=lambda point: point.ratio)
