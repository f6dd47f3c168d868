"""Fixtures of several folders of the tuner's tests."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashtune.core.record import Verdict
from flashtune.tuner.execution import sdpa
from flashtune.tuner.verify import record_checks, verify_jobs
from tests.support.fakes import install
from tests.support.jobs import FakePool

INTERPRETED = Verdict(passed=True, worst_ratio=0.5, checks=9, failed="", device="interpreter")


@pytest.fixture
def quick_jobs(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """Kernels count as compiled and interpreted."""
    pool = FakePool(
        {verify_jobs.why_not_compiled: lambda *_: "", verify_jobs.check_interpreted: lambda _: INTERPRETED}
    )
    pool.use(monkeypatch, verify_jobs, name="start_interpreters")
    return pool.use(monkeypatch, record_checks)


class GpuMemory:
    """The answers of `torch.cuda` about the memory of a GPU that is not there.

    Attributes:
        free: Free bytes.
        reserved: Bytes that this process keeps for later tensors.
        at_release: Called when the process gives them back.
    """

    def __init__(self) -> None:
        self.free: float = 2**30
        self.reserved = 0
        self.at_release: Callable[[], None] = lambda: None

    def mem_get_info(self, device: object = None) -> tuple[float, float]:
        return self.free, self.free

    def memory_reserved(self, device: object = None) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.at_release()

    def synchronize(self, device: object = None) -> None:
        pass

    def device(self, device: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> GpuMemory:
    """A GPU of 1 GiB. Tensors are on the CPU."""
    memory = GpuMemory()
    install(monkeypatch, memory, torch.cuda)
    return memory


@pytest.fixture
def backends() -> Iterator[dict[str, SDPBackend]]:
    """The backends of SDPA that are timed: only the one that computes on the CPU."""
    with mock.patch.dict(sdpa.BACKENDS, {"sdpa-math": SDPBackend.MATH}, clear=True):
        yield sdpa.BACKENDS
