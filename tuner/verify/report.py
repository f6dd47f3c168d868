"""The report of a verification: a result for each selected kernel of a table."""

from __future__ import annotations

import enum

import msgspec

from flashtune.tuner.tables.receipts import Receipt
from flashtune.tuner.verify.on_gpu import OnGpu


class CheckMethod(enum.StrEnum):
    """The methods of comparison with the reference, best first."""

    GPU = "gpu"
    INTERPRETER = "interpreter"
    RECEIPT = "receipt"
    NONE = "none"


class Result(msgspec.Struct, frozen=True):
    """The result of one selected kernel.

    Attributes:
        problem: The problem's key.
        target: Name of the GPU.
        family: The kernel's family.
        kernel: Digest of the kernel as rendered here; None if it cannot be rendered.
        means: The method; `none` if it was not run here and has no valid receipt.
        failed: Why it failed; empty if it passed.
        receipt: The record's receipt; None unless it is valid for this kernel.
    """

    problem: str
    target: str
    family: str
    kernel: str | None
    means: CheckMethod
    failed: str = ""
    receipt: Receipt | None = None


class Report(msgspec.Struct, frozen=True):
    """All results, and the verdicts and times of this machine's GPU.

    Attributes:
        results: One for each selected kernel that was checked, in the table's order.
        baselines: Number of selected baselines.
        missed: Number of selected kernels that were not checked before the run ended.
        on_gpu: The verdicts and times of this machine's GPU.
    """

    results: tuple[Result, ...]
    baselines: int
    missed: int = 0
    on_gpu: OnGpu = OnGpu()

    def count(self, means: CheckMethod) -> int:
        """Returns the number of results of a method, passed or failed."""
        return sum(result.means is means for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """Returns the failed results."""
        return tuple(result for result in self.results if result.failed)
