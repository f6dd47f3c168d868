"""Verifications in worker processes without a GPU."""

import os
from pathlib import Path

from flashtune.bundle.bundle_file import open_bundle
from flashtune.bundle.records import Receipt
from flashtune.core.record import Verdict
from flashtune.tuner.verify.bundle_verification import Job, Result
from tests.support.values import present

VERDICT = Verdict(passed=True, worst_ratio=0.5, checks=3, failed="", device="NVIDIA H200")
# Numbers of kernels that fail.
WRONG, FATAL, CROWDED = 2, 3, 4


class Passes(dict[str, Receipt]):
    """A receipt of a GPU for all machine code, in place of those that ship."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def get(self, machine: str, default: object = None) -> Receipt:
        return Receipt(machine, self.target, "580.1", VERDICT)


def pass_most(path: Path, job: Job, index: int) -> list[Result]:
    """One kernel is wrong, one ends its process, and one finds memory only in a new process on its own."""
    return [_result(path, use.kernel, index) for use in job]


def _result(path: Path, kernel: str, index: int) -> Result:
    number = int(kernel, 16)
    if number == FATAL:
        os.abort()
    if number == WRONG:
        return "wrong"
    marked = path.with_name("crowded")
    if number == CROWDED and not marked.exists():
        marked.touch()
        return "CUDA out of memory"
    entry = present(open_bundle(path).entry(kernel))
    return Receipt(entry.machine, "nvidia-h200", f"on {index}", VERDICT)
