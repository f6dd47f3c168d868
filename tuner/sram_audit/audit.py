"""Compares the SRAM models with the compiler.

A model must be a lower bound: it must never prune a config that fits. It should find nearly all of the
others, to save their compilation.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from statistics import median

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.target import TARGETS, Target
from flashtune.templates.registry import families, family_names
from flashtune.tuner.binary.resources import overflow
from flashtune.tuner.candidates import SearchTask, demand
from flashtune.tuner.execution.compile_pool import Compiled, Compiler
from flashtune.tuner.sram_audit.points import Point, computes_anything, draw_points

# Minimum fraction of configs that do not fit, and that the model must find.
BAR = 0.9
# With fewer such configs of a target, the fraction says little.
FEWEST = 20
# Half of the points are in this band: SRAM by the compiler over the capacity of a block.
BAND = (0.75, 1.33)
# Maximum number of compilations for each point of the result.
MAX_DRAWN = 24

Watch = Callable[[str, int, int], None]


class Request(msgspec.Struct, frozen=True):
    """The targets and points of an audit."""

    targets: tuple[Target, ...]  # The GPUs to compile for.
    points: int  # Points for each family and target, half of them in the band.
    seed: int = 0  # Seed of the points.
    in_flight: int = 2  # Number of concurrent compilations. It does not change the result.
    # The families to audit.
    families: tuple[str, ...] = msgspec.field(default_factory=family_names)


class Observed(msgspec.Struct, frozen=True):
    """One point: its SRAM by the model and by the compiler."""

    point: Point  # The config, its problem and its alignment.
    modelled: int  # SRAM by the model, in bytes.
    sram_bytes: int  # SRAM by the compiler, in bytes.
    capacity: int  # Maximum SRAM of a block, in bytes.
    fits: bool  # Whether SRAM and tensor memory by the compiler are within the target's.
    pruned: bool  # Whether the model would have pruned it.

    @property
    def in_band(self) -> bool:
        """Returns whether its SRAM is close to the capacity."""
        return BAND[0] <= self.sram_bytes / self.capacity <= BAND[1]


class Row(msgspec.Struct, frozen=True):
    """The result for one family on one target."""

    family: str
    target: str
    arch: str  # Its architecture.
    points: int  # Points compared.
    in_band: int  # Those within 0.75 to 1.33 of the SRAM capacity by the compiler.
    unaligned: int  # Those with strides that are not multiples of 16.
    fits: int  # Points that fit.
    misfits: int  # Points that do not.
    wrongly_pruned: int  # Points that fit and that the model rejected. Must be 0.
    caught: int  # Points that do not fit and that the model rejected.
    overestimates: int  # Points for which the model's SRAM exceeds the compiler's.
    median_ratio: float  # Median of the model's figure over the compiler's.
    refused: int  # Compilations that failed or ran out of time. They count nowhere else.


class Audit(msgspec.Struct, frozen=True):
    """An audit, with the version of its compiler."""

    triton: str
    seed: int
    rows: tuple[Row, ...]

    def failures(self) -> tuple[str, ...]:
        """Returns the violated requirements, one sentence each; empty if there are none.

        A target with fewer than `FEWEST` configs that do not fit is not judged by their fraction.
        """
        sentences = [
            f"{row.family} on {row.target}: {row.wrongly_pruned} configs that fit were pruned"
            for row in self.rows
            if row.wrongly_pruned
        ]
        for target, (caught, misfits) in self._caught().items():
            if misfits >= FEWEST and caught < BAR * misfits:
                sentences.append(f"{target}: {caught} of {misfits} that do not fit were caught")
        return tuple(sentences)

    def unjudged(self) -> tuple[str, ...]:
        """Returns the targets with too few configs that do not fit, one sentence each."""
        return tuple(
            f"{target}: {misfits} that do not fit are too few to judge by, fewer than {FEWEST}"
            for target, (_, misfits) in self._caught().items()
            if misfits < FEWEST
        )

    def _caught(self) -> dict[str, tuple[int, int]]:
        """Returns the configs that were caught, and those that do not fit, by target."""
        counts: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            caught, misfits = counts.get(row.target, (0, 0))
            counts[row.target] = caught + row.caught, misfits + row.misfits
        return counts


def audit_targets() -> tuple[Target, ...]:
    """Returns one GPU of the table for each architecture."""
    by_arch: dict[str, Target] = {}
    for target in TARGETS:
        by_arch.setdefault(target.arch, target)
    return tuple(by_arch.values())


def run_audit(request: Request, compiler: Compiler, watch: Watch) -> Audit:
    """Compares each family's model with the compiler on each target that the family supports.

    `watch` is called with a label, the number of finished points, and their total.
    """
    import triton

    rows = []
    audited = [family for family in families() if family.name in request.families]
    for target, family in itertools.product(request.targets, audited):
        if not computes_anything(family, target):
            continue
        drawn = itertools.islice(draw_points(family, target, request.seed), MAX_DRAWN * request.points)
        compiled = _compiled(drawn, target, compiler, request.in_flight)
        name = f"{family.name} on {target.name}"
        observed, refused = _collect(compiled, target, request.points, functools.partial(watch, name))
        if len(observed) < request.points:
            raise UsageError(
                f"only {len(observed)} of {request.points} points of {name} could be had with half of them "
                "near the capacity: ask for fewer --points"
            )
        rows.append(account(family.name, target, observed, refused))
    return Audit(triton.__version__, request.seed, tuple(rows))


def _compiled(
    drawn: Iterator[Point], target: Target, compiler: Compiler, in_flight: int
) -> Iterator[tuple[Point, Compiled]]:
    """Returns points with the results of their compilation, in order, for any number in flight."""
    waiting: deque[tuple[Point, Future[Compiled]]] = deque()
    while True:
        waiting.extend(
            (point, compiler.submit(_scope(point, target), point.candidate))
            for point in itertools.islice(drawn, in_flight - len(waiting))
        )
        if not waiting:
            return
        point, future = waiting.popleft()
        yield point, future.result()


def _collect(
    compiled: Iterator[tuple[Point, Compiled]], target: Target, points: int, watch: Callable[[int, int], None]
) -> tuple[list[Observed], int]:
    """Returns the first points, at most half of them out of the band, and the count of failures."""
    kept: list[Observed] = []
    room = {True: points - points // 2, False: points // 2}
    refused = 0
    for point, result in compiled:
        observed = observe(point, target, result)
        if observed is None:
            refused += 1
        elif room[observed.in_band]:
            room[observed.in_band] -= 1
            kept.append(observed)
            watch(len(kept), points)
        if len(kept) == points:
            break
    return kept, refused


def _scope(point: Point, target: Target) -> SearchTask:
    return SearchTask(point.problem, target, point.specialization, ())


def observe(point: Point, target: Target, compiled: Compiled) -> Observed | None:
    """Returns a point with its SRAM by model and compiler, None if the compilation failed."""
    resources = compiled.resources
    if resources is None:
        return None
    modelled = demand(_scope(point, target), point.candidate)
    return Observed(
        point=point,
        modelled=modelled.sram_bytes,
        sram_bytes=resources.sram_bytes,
        capacity=target.sram_per_block,
        fits=not overflow(resources, target),
        pruned=modelled.excess > 0,
    )


def account(family: str, target: Target, observed: list[Observed], refused: int) -> Row:
    """Returns the counts of one family on one target."""
    misfits = [entry for entry in observed if not entry.fits]
    return Row(
        family=family,
        target=target.name,
        arch=target.arch,
        points=len(observed),
        in_band=sum(entry.in_band for entry in observed),
        unaligned=sum(entry.point.unaligned for entry in observed),
        fits=len(observed) - len(misfits),
        misfits=len(misfits),
        wrongly_pruned=sum(entry.fits and entry.pruned for entry in observed),
        caught=sum(entry.pruned for entry in misfits),
        overestimates=sum(entry.modelled > entry.sram_bytes for entry in observed),
        median_ratio=median(entry.modelled / max(entry.sram_bytes, 1) for entry in observed),
        refused=refused,
    )
