"""A `Measurer` that predicts times, for searches without a GPU."""

from __future__ import annotations

import math
from concurrent.futures import Future

from flashtune.core.record import Measurement, Outcome, Provenance
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.perf_model.calibration import expected_ms, shipped_fit


class Predictor:
    """Returns predicted times, without verification."""

    provenance = Provenance.PREDICTED

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Predicts the time from the compiler's report. The future is already done."""
        del drop_above_ms  # there is no launch to cut short
        assert compiled.resources is not None
        family = find_family(candidate.family)
        ms = expected_ms(
            scope.problem, family, candidate.config, compiled.resources, scope.target, shipped_fit()
        )
        if math.isinf(ms):
            return _done(Evaluation(Outcome.INFEASIBLE, message="not one block fits a multiprocessor"))
        return _done(Evaluation(Outcome.OK, measurement=Measurement(ms, ms, ms, 0)))

    def finals(self, scope: SearchTask, candidates: tuple[Candidate, ...]) -> Future[tuple[Measurement, ...]]:
        """Returns an empty result, because a second prediction would be the same."""
        del scope, candidates
        done: Future[tuple[Measurement, ...]] = Future()
        done.set_result(())
        return done

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Returns None, because schedule fuzzing needs a GPU."""
        del scope, candidate
        done: Future[Evaluation | None] = Future()
        done.set_result(None)
        return done


def _done(evaluation: Evaluation) -> Future[Evaluation]:
    future: Future[Evaluation] = Future()
    future.set_result(evaluation)
    return future
