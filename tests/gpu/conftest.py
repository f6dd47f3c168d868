"""Fixtures of the GPU tests of the runtime."""

from collections.abc import Iterator

import pytest

from flashtune.dispatch import platform
from flashtune.dispatch.tables import Tables, tuned_records
from tests.gpu.calls import forget


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is tuned, whatever ships for this GPU, and nothing is remembered."""
    forget()
    monkeypatch.setattr(platform, "tuned_records", lambda _: Tables({}, {}))
    yield
    forget()


@pytest.fixture
def own_tables(untuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's database is read after all."""
    monkeypatch.setattr(platform, "tuned_records", tuned_records)
