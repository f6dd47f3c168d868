"""A process pool that runs its jobs in the process of the test."""

from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Self

import pytest
from pebble import ProcessExpired

from flashtune.core.errors import FlashtuneError


class FakePool:
    """Runs each job at once, or another function instead of the job's.

    Attributes:
        replaced: The functions that run, by the functions that they replace.
        starts: The number of workers of each start.
    """

    def __init__(self, replaced: dict[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        self.replaced = replaced or {}
        self.starts: list[int] = []

    def use(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, name: str = "start_pool") -> Self:
        """Lets modules start this pool instead of processes."""
        for module in modules:
            monkeypatch.setattr(module, name, self.start)
        return self

    def start(self, workers: int) -> Self:
        self.starts.append(workers)
        return self

    def schedule(self, function: Callable[..., Any], args: Any = (), timeout: float = 0.0) -> Future[Any]:
        assert timeout > 0
        job: Future[Any] = Future()
        try:
            job.set_result(self.replaced.get(function, function)(*args))
        except (FlashtuneError, MemoryError, ProcessExpired, TimeoutError) as error:
            job.set_exception(error)
        return job

    def stop(self) -> None:
        pass

    def join(self) -> None:
        pass
