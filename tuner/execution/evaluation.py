"""The result of running a candidate, and the interface of measurers: a GPU, a prediction, a stored table.

`Predictor` is the measurer of searches without a GPU.
"""

import math
from concurrent.futures import Future
from typing import Protocol, TypeVar

import msgspec

from flashtune.bundle.records import Entry
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Measurement, Outcome, Provenance, Verdict
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.processes import NOTHING_LOST
from flashtune.tuner.perf_model.prediction import expected_ms, shipped_fit

Result = TypeVar("Result")
# An entry of a bundle with its machine code by SHA-256, or nothing.
MachineCode = tuple[tuple[Entry, dict[str, bytes]], ...]


class DeviceLostError(FlashtuneError):
    """The GPU is gone or cannot be used. Finished candidates are stored."""

    @property
    def reason(self) -> str:
        """The part of the message that names the GPU and the reason."""
        return str(self).removesuffix(f": {NOTHING_LOST}")


class Evaluation(msgspec.Struct, frozen=True):
    """The result of running a candidate: `ok`, `wrong_result`, `launch_error` or `timeout`, and why."""

    outcome: Outcome
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    message: str = ""


class Measurer(Protocol):
    """Verifies and times candidates, one after the other."""

    provenance: Provenance  # The origin of its times.

    @property
    def gpu_uuid(self) -> str | None:
        """The physical GPU, None if it is not known."""
        ...

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        """Prepares for a problem while its first candidates compile. Does not wait."""
        ...

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Verifies, then measures. The future raises only `DeviceLostError` and `MachineError`."""
        ...

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        """Times candidates and baselines in one run. The result is empty if that is impossible or fails.

        The fastest are timed once more, in at most `closest_seconds`.
        """
        ...

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Verifies a candidate with schedule fuzzing. The result is None if it cannot be fuzzed."""
        ...

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        """Returns a verified candidate as an entry of a bundle, or nothing if it cannot be one."""
        ...


def lost_device(device: int, reason: str) -> DeviceLostError:
    """Returns the error for a GPU that cannot be used, with the reason."""
    return DeviceLostError(f"GPU {device} cannot be used ({reason}): {NOTHING_LOST}")


class Predictor:
    """Returns predicted times, without verification."""

    provenance = Provenance.PREDICTED
    gpu_uuid = None

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        """Does nothing."""

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

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        """Returns an empty result, because a second prediction would be the same."""
        del scope, candidates, closest_seconds
        return _done(())

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Returns None, because schedule fuzzing needs a GPU."""
        del scope, candidate
        return _done(None)

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        """Returns nothing, because nothing was verified."""
        del scope, candidate
        return _done(())


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
