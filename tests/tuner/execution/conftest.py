"""Fixtures of the tests of launches and times."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from flashtune.tuner.execution import timed_runs


class Binder:
    """The arguments of each binding and of each launch."""

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def bind(self, *arguments: Any) -> Any:
        self.bound.append(arguments)
        return lambda *values: self.launches.append(values)


@pytest.fixture
def binder() -> Iterator[Binder]:
    """Kernels are neither rendered nor bound."""
    fake = Binder()
    with mock.patch.multiple(timed_runs, render=lambda *_: None, bind=fake.bind):
        yield fake
