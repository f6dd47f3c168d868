"""What verification says of a table: a result for each selected kernel."""

from __future__ import annotations

import enum

import msgspec

from flashtune.tuner.tables.receipts import Receipt
from flashtune.tuner.verify.on_gpu import OnGpu


class Means(enum.StrEnum):
    """How a kernel's results were compared with the reference, best first."""

    GPU = "gpu"
    INTERPRETER = "interpreter"
    RECEIPT = "receipt"
    NONE = "none"


class Result(msgspec.Struct, frozen=True):
    """What verification says of one selected kernel.

    Attributes:
        problem: The problem's key.
        target: Name of the GPU.
        family: The kernel's family.
        kernel: Digest of the kernel as rendered here, None where it could not be.
        means: How it was compared; `none` where it was neither run here nor has a good receipt.
        failed: Why it failed, empty if it passed.
        receipt: The record's receipt, None unless it is a good one of this very kernel.
    """

    problem: str
    target: str
    family: str
    kernel: str | None
    means: Means
    failed: str = ""
    receipt: Receipt | None = None


class Report(msgspec.Struct, frozen=True):
    """All results, and what a GPU's checks leave to be remembered.

    Attributes:
        results: One for each selected kernel that was reached, in the table's order.
        baselines: Selections that are no generated kernel.
        missed: Selected kernels that were not reached before the run ended.
        on_gpu: The verdicts and times of the GPU here.
    """

    results: tuple[Result, ...]
    baselines: int
    missed: int = 0
    on_gpu: OnGpu = OnGpu()

    def count(self, means: Means) -> int:
        """How many were compared by a means, whatever came of it."""
        return sum(result.means is means for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """What did not pass."""
        return tuple(result for result in self.results if result.failed)
