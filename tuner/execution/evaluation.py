"""The result of running a candidate, and the interface of measurers: a GPU, a prediction, a stored table."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Measurement, Outcome, Provenance, Verdict
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled


class DeviceLostError(FlashtuneError):
    """The GPU is gone or cannot be used. Finished candidates are stored."""


class Evaluation(msgspec.Struct, frozen=True):
    """The result of running a candidate: `ok`, `wrong_result`, `launch_error` or `timeout`, and why."""

    outcome: Outcome
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    message: str = ""


class Measurer(Protocol):
    """Verifies and times candidates, one after the other.

    Attributes:
        provenance: The origin of its times.
    """

    provenance: Provenance

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Verifies, then measures. The future raises only `DeviceLostError` and `MachineError`."""
        ...

    def finals(self, scope: SearchTask, candidates: tuple[Candidate, ...]) -> Future[tuple[Measurement, ...]]:
        """Times candidates and baselines in one run. The result is empty if that is impossible or fails."""
        ...

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Verifies a candidate with schedule fuzzing. The result is None if it cannot be fuzzed."""
        ...


def lost_device(device: int, reason: str) -> DeviceLostError:
    """Returns the error for a GPU that cannot be used, with the reason."""
    return DeviceLostError(
        f"GPU {device} cannot be used ({reason}): what was finished is stored, and the same command goes on"
    )
