"""What running a candidate gives, and who finds out: a GPU, a prediction, a stored table."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Measurement, Outcome, Provenance, Verdict
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.execution.compile_pool import Compiled


class DeviceLostError(FlashtuneError):
    """The GPU is gone or cannot be used; what was finished is stored."""


class Evaluation(msgspec.Struct, frozen=True):
    """What running a candidate gave: `ok`, `wrong_result`, `launch_error` or `timeout`, and why."""

    outcome: Outcome
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    message: str = ""


class Measurer(Protocol):
    """Proves and times candidates, one after the other.

    Attributes:
        provenance: Where its times come from.
    """

    provenance: Provenance

    def evaluate(
        self, scope: Scope, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Verifies, then measures; the future raises nothing but `DeviceLostError` and `MachineError`."""
        ...

    def finals(self, scope: Scope, candidates: tuple[Candidate, ...]) -> Future[tuple[Measurement, ...]]:
        """Times candidates and peers in one run; nothing where that is impossible or came to grief."""
        ...

    def evaluate_delayed(self, scope: Scope, candidate: Candidate) -> Future[Evaluation | None]:
        """Verifies a candidate with warps that fall behind; None where that tells nothing, or cannot be."""
        ...


def lost_device(device: int, reason: str) -> DeviceLostError:
    """The error of a GPU that cannot be used, and why."""
    return DeviceLostError(
        f"GPU {device} cannot be used ({reason}): what was finished is stored, and the same command goes on"
    )
