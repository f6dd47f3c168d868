"""An estimate, before a search starts, of the number of trials and of the search time."""

import math
import statistics
from collections.abc import Iterable

import msgspec

from flashtune.core.record import Provenance, Record
from flashtune.db.store import Store
from flashtune.tuner.search.driver import search_scope
from flashtune.tuner.search.request import SearchRequest
from flashtune.tuner.search.warm_start import finished

# Shorter compilations, in seconds, were hits of Triton's cache.
CACHED_SECONDS = 0.2
# Seconds to compile a candidate on one core, if no record has a time.
USUAL_SECONDS = 2.0


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """The expected extent of one search."""

    problem: str  # Key of the problem.
    target: str
    families: dict[str, int]  # The families to search, with their numbers of candidates.
    candidates: int  # Size of all spaces.
    known: int  # Candidates that earlier searches compiled.
    tried: int  # Approximate maximum of compiled candidates, `known` included.
    seconds: float  # Approximate maximum of wall-clock time, without the finals.


def expect(request: SearchRequest, store: Store | None, width: int, compile_seconds: float) -> Expectation:
    """Returns the expected extent of a search.

    One process needs `compile_seconds` for one candidate. `store` is None without a database.
    """
    scope = search_scope(request)
    families = {entry.family.name: entry.space.size() for entry in scope.spaces}
    candidates = sum(families.values())
    provenance = Provenance.PREDICTED if request.device is None else Provenance.MEASURED
    rows = finished(store, scope, provenance).values() if store else ()
    compiled = sum(row.record.kernel is not None for row in rows)
    rate = width / compile_seconds
    most = min(candidates, request.budget.trials or candidates)
    seconds = min(request.budget.seconds or math.inf, max(0, most - compiled) / rate)
    return Expectation(
        problem=request.problem.key,
        target=request.target.name,
        families=families,
        candidates=candidates,
        known=compiled,
        tried=max(compiled, min(most, compiled + round(seconds * rate))),
        seconds=seconds,
    )


def usual_compile_seconds(*sources: Iterable[Record]) -> float:
    """Returns the median time of compilations that missed the cache, in seconds.

    The first source with such compilations is used.
    """
    for records in sources:
        taken = [record.resources.compile_seconds for record in records if record.resources]
        real = [seconds for seconds in taken if seconds > CACHED_SECONDS]
        if real:
            return statistics.median(real)
    return USUAL_SECONDS


def outlook(expected: tuple[Expectation, ...], gpus: int = 1) -> str:
    """Describes the expected extent of all searches together in one sentence."""
    candidates = sum(expectation.candidates for expectation in expected)
    tried = sum(expectation.tried for expectation in expected)
    share = f"about {tried:,} of {candidates:,} candidates ({_percent(tried / max(1, candidates))})"
    each = [expectation.seconds for expectation in expected]
    seconds = duration(max(sum(each) / max(1, gpus), *each))
    if len(expected) == 1:
        return f"{share} in about {seconds}"
    where = f" on {gpus} GPUs" if gpus > 1 else ""
    return f"{len(expected)} shapes: {share} in about {seconds} in all{where}"


def duration(seconds: float) -> str:
    """Formats seconds as `45 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    if seconds < 7200:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"
