"""Fixtures of several folders of the tuner's tests."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashtune.core.record import Verdict
from flashtune.tuner.execution import sdpa
from flashtune.tuner.verify import record_checks, verify_jobs
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
    """The memory of a GPU: free bytes, bytes kept for later tensors, and a call that gives these back."""

    def __init__(self) -> None:
        self.free: float = 2**30
        self.reserved = 0
        self.release = mock.Mock()


@pytest.fixture
def gpu_memory() -> Iterator[GpuMemory]:
    """A GPU of 1 GiB for `torch.cuda`. Tensors are on the CPU."""
    memory = GpuMemory()
    with mock.patch.multiple(
        torch.cuda,
        mem_get_info=lambda device: (memory.free, memory.free),
        memory_reserved=lambda device: memory.reserved,
        empty_cache=memory.release,
        synchronize=lambda *_: None,
        device=lambda device: contextlib.nullcontext(),
    ):
        yield memory


@pytest.fixture
def backends() -> Iterator[dict[str, SDPBackend]]:
    """The backends of SDPA that are timed: only the one that computes on the CPU."""
    with mock.patch.dict(sdpa.BACKENDS, {"sdpa-math": SDPBackend.MATH}, clear=True):
        yield sdpa.BACKENDS
