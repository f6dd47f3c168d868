"""Fixtures of several folders of the tuner's tests."""

import pytest

from flashtune.tuner.verify import record_checks


@pytest.fixture
def quick_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels count as compiled and interpreted."""
    monkeypatch.setattr(
        record_checks, "_compile", lambda subjects, _: {record_checks._binary(s): "" for s in subjects}
    )
    monkeypatch.setattr(
        record_checks, "_interpret", lambda subjects, _: {record_checks._source(s): "" for s in subjects}
    )
