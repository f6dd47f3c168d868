"""Fixtures of the tests of launches and times."""

from typing import Any

import pytest

from flashtune.tuner.execution import timed_runs
from tests.support.fakes import install


class Binder:
    """Renders and binds no kernel, and notes what is bound and the arguments of each launch."""

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def render(self, *_: object) -> None:
        return None

    def bind(self, *arguments: Any) -> Any:
        self.bound.append(arguments)
        return lambda *values: self.launches.append(values)


@pytest.fixture
def binder(monkeypatch: pytest.MonkeyPatch) -> Binder:
    fake = Binder()
    install(monkeypatch, fake, timed_runs)
    return fake
