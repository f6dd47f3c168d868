"""What the GPU tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashtune import decision
from flashtune.calls import forget_servers
from flashtune.notices import forget_told
from flashtune.self_check import forget_verdicts
from flashtune.tables import Tables


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is tuned and nothing is remembered."""

    def forget() -> None:
        forget_servers()
        forget_told()
        forget_verdicts()

    forget()
    monkeypatch.setattr(decision, "tuned_records", lambda _: Tables({}, {}))
    yield
    forget()
