"""The search: propose, prune, compile, verify, measure, store; then finals, last verification, selection."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

from flashtune.core.errors import MachineError, ProblemError
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.errors import ServerUnavailableError
from flashtune.db.store import Store, StoredRecord
from flashtune.dispatch.lookup import default_selection
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization, demand, open_spaces
from flashtune.tuner.execution.backend import SearchWorkers, open_workers
from flashtune.tuner.execution.evaluation import DeviceLostError
from flashtune.tuner.perf_model.prediction import shipped_fit
from flashtune.tuner.search.finals import COMPILED_AHEAD, prove_choice, run_finals, selected
from flashtune.tuner.search.machine_code import store_machine_code
from flashtune.tuner.search.pipeline import Pipeline
from flashtune.tuner.search.policy import Policy, SearchContext, default_policy
from flashtune.tuner.search.ranking import initial_design, promising, rank
from flashtune.tuner.search.request import (
    Budget,
    Observer,
    Phase,
    Progress,
    SearchRequest,
    SearchResult,
    WarmStart,
)
from flashtune.tuner.search.trial_log import TrialLog
from flashtune.tuner.search.warm_start import known_winners, warm_configs
from flashtune.tuner.workloads.models import forward_of

__all__ = ["Budget", "SearchRequest", "SearchResult", "run_search", "search_scope"]


def run_search(
    request: SearchRequest,
    store: Store,
    observer: Observer = lambda progress: None,
    equipment: SearchWorkers | None = None,
    policy: Policy = default_policy,
    following: Callable[[], SearchRequest | None] = lambda: None,
    *,
    keeps_code: Callable[[], bool] = lambda: True,
) -> SearchResult:
    """Searches kernels for one problem on one GPU, and stores every result at once.

    Stored results for the same problem, target, config and versions are reused, times only on the same
    physical GPU. The same request therefore continues an interrupted search. The observer is called several
    times a second. Without `equipment`, the search starts its own compiler and measurer. `following` is
    called before the finals. The first candidates of the search that it returns compile during the finals.
    After Ctrl-C, the search selects the best kernel so far and raises `KeyboardInterrupt` again.
    `keeps_code` returns whether the machine code of the selection is stored for later processes.
    """
    scope = search_scope(request)
    workers = contextlib.nullcontext(equipment) if equipment else open_workers(request.device, request.jobs)
    with workers as tools:
        clock, measures = tools.clock, tools.measurer
        started = clock.now()
        journal = TrialLog(store, scope, measures, retry_failed=request.retry_failed)
        reporter = _Reporter(request, journal, observer, lambda: clock.now() - started)
        reporter.report(Phase.STARTING)
        experience = _experience(request, scope, store)
        enqueued = _promised(request, scope, experience)
        _compile_forward(scope, tools)
        for candidate in enqueued[:1]:
            measures.warm_up(scope, candidate)
        context = SearchContext(
            scope, enqueued, journal.answers(), request.budget.trials, request.seed, experience.fit
        )
        pipeline = Pipeline(scope, policy(context), tools, journal, frozenset(enqueued))
        try:
            stop = pipeline.run(request.budget, started, lambda: reporter.report(Phase.SEARCHING))
            reporter.report(Phase.FINALS)
            following_request = following()
            if following_request is not None:
                _compile_ahead(following_request, store, tools)
            run_finals(scope, journal, tools, request.budget)
            prove_choice(scope, journal, tools, request.budget)
        except (KeyboardInterrupt, DeviceLostError, MachineError):
            # A verified and timed kernel can be selected without finals and schedule fuzzing.
            with contextlib.suppress(ServerUnavailableError):
                _pin(store, request, journal)
            raise
        best, fallback, pinned = _pin(store, request, journal)
        measured = measures.provenance is Provenance.MEASURED
        if pinned and measured and keeps_code() and request.target.is_nvidia:
            rows = [row for row in dict.fromkeys((best, fallback)) if row is not None]
            store_machine_code(scope, rows, tools, store)
    reporter.report(Phase.DONE)
    return SearchResult(
        problem=request.problem,
        target=request.target,
        provenance=measures.provenance,
        stop=stop,
        seconds=clock.now() - started,
        counts=journal.tally(),
        candidates=sum(entry.space.size() for entry in scope.spaces),
        best=best.record if best else None,
        best_id=best.id if best else None,
        is_selected=pinned,
        fallback=fallback.record if fallback else None,
        default=_default(scope, journal),
        reasons=journal.reasons(),
    )


def search_scope(request: SearchRequest) -> SearchTask:
    """Returns the scope of a search. Families that are predicted far slower are left out unless named."""
    problem = request.problem
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
        raise ProblemError(f"{problem.key} is empty, so nothing can be searched: give lengths of at least 1")
    spaces = open_spaces(problem, request.target, request.families, request.spaces)
    assumed = contiguous_specialization(problem, lse=request.lse)
    scope = SearchTask(problem, request.target, assumed, spaces, request.driver)
    return scope if request.families or request.spaces else promising(scope, shipped_fit())


def _experience(request: SearchRequest, scope: SearchTask, store: Store) -> WarmStart:
    return request.experience or WarmStart(warm_configs(known_winners(store), scope), shipped_fit())


def _compile_ahead(request: SearchRequest, store: Store, tools: SearchWorkers) -> None:
    """Starts compiling the first candidates of the next search into Triton's cache."""
    scope = search_scope(request)
    enqueued = _promised(request, scope, _experience(request, scope, store))
    _compile_forward(scope, tools)
    for candidate in enqueued[: max(0, tools.compiler.width - COMPILED_AHEAD)]:
        if not demand(scope, candidate).excess:
            tools.compiler.submit(scope, candidate)


def likely_candidates(request: SearchRequest, store: Store, limit: int) -> Iterator[Candidate]:
    """Yields the candidates that a search tries first and those with the fastest predictions, if they fit."""
    scope = search_scope(request)
    experience = _experience(request, scope, store)
    designed = initial_design(rank(scope, request.seed, experience.fit), limit)
    candidates = dict.fromkeys((*_promised(request, scope, experience), *designed))
    return (candidate for candidate in candidates if not demand(scope, candidate).excess)


def _compile_forward(scope: SearchTask, tools: SearchWorkers) -> None:
    """Starts compiling the forward pass that computes the inputs of a gradient, into Triton's cache."""
    if scope.problem.is_backward and tools.measurer.provenance is Provenance.MEASURED:
        forward = forward_of(scope.problem)
        assumed = contiguous_specialization(forward, lse=True)
        record = default_selection(forward, scope.target, assumed).record
        assert record.config is not None
        task = SearchTask(forward, scope.target, assumed, ())
        tools.compiler.submit(task, Candidate(record.family, record.config))


def _promised(request: SearchRequest, scope: SearchTask, experience: WarmStart) -> tuple[Candidate, ...]:
    """Returns the candidates that are always tried first: family defaults, and winners of near shapes."""
    defaults = (
        candidate for candidate in scope.defaults() if not request.spaces or scope.contains(candidate)
    )
    return tuple(dict.fromkeys((*defaults, *experience.warm)))


def _pin(
    store: Store, request: SearchRequest, journal: TrialLog
) -> tuple[StoredRecord | None, StoredRecord | None, bool]:
    """Chooses among the finalists, or among all candidates without finals, and stores the selection.

    A predicted record never replaces a measured one. A search of some families never replaces a
    faster selection of another family.

    Returns:
        The chosen record; the fallback for tensors that the selection cannot address; and whether
        the chosen record became the selection.
    """
    rows = journal.contenders()
    best = selected(rows)
    if best is None:
        return None, None, False
    chosen = best.record
    pinned = store.pin(best.id, lambda present: _stands(present, chosen, request))
    other = selected(row for row in rows if serves_any_tensors(row.record))
    measured = other is not None and other.record.provenance is Provenance.MEASURED
    if other is None or not (pinned or measured) or not store.fallback(other.id):
        other = None
    return best, other, pinned


def _stands(present: Record, chosen: Record, request: SearchRequest) -> bool:
    """Returns whether the present selection stays, in place of the record that a search chose."""
    if present.provenance is Provenance.PREDICTED:
        return False
    if chosen.provenance is Provenance.PREDICTED:
        return True
    # This search timed the families that it searched in one run, which is more precise than stored times.
    if present.config is None or not request.families or present.family in request.families:
        return False
    installed = present.versions.makers == current_versions(present.family, request.driver).makers
    return installed and (present.ms or math.inf) < (chosen.ms or math.inf)


def _default(scope: SearchTask, journal: TrialLog) -> Record | None:
    """Returns the record of the fastest family default, with its time of the finals if it has one."""
    rows = [row for candidate in scope.defaults() if (row := journal.rows.get(candidate)) is not None]
    right = [row.record for row in rows if row.record.outcome is Outcome.OK]
    return min(right, key=lambda record: record.ms or 0.0, default=None)


class _Reporter:
    """Sends the progress of a search to the observer."""

    def __init__(
        self, request: SearchRequest, journal: TrialLog, observer: Observer, elapsed: Callable[[], float]
    ) -> None:
        self._request = request
        self._journal = journal
        self._observer = observer
        self._elapsed = elapsed
        self._before = journal.tally().tried
        self._reported = len(journal.rows)

    def report(self, phase: Phase) -> None:
        tally = self._journal.tally()
        # Rows are in the order in which candidates finished.
        fresh = itertools.islice(self._journal.rows.values(), self._reported, None)
        finished = tuple(row.record for row in fresh)
        self._reported += len(finished)
        seconds = self._elapsed()
        self._observer(
            Progress(
                problem=self._request.problem,
                phase=phase,
                counts=tally,
                expected=self._request.budget.trials,
                best=self._journal.best,
                seconds=seconds,
                remaining=self._remaining(tally.tried, seconds),
                finished=finished,
            )
        )

    def _remaining(self, tried: int, seconds: float) -> float | None:
        """Returns the seconds until the time or the trials run out, at the present rate of trials."""
        budget = self._request.budget
        ends = [] if budget.seconds is None else [budget.seconds - seconds]
        if budget.trials is not None and tried > self._before:
            ends.append((budget.trials - tried) * seconds / (tried - self._before))
        return max(0.0, min(ends)) if ends else None
