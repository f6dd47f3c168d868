"""Fixtures of the GPU tests of the runtime."""

from collections.abc import Callable, Iterator

import pytest

from flashtune.dispatch import decision
from flashtune.dispatch.platform import Platform
from flashtune.dispatch.tables import Tables
from tests.gpu.calls import forget
from tests.support.runtime import Tuned, using


@pytest.fixture
def untuned() -> Iterator[None]:
    """Nothing is tuned, whatever ships for this GPU, and nothing is remembered."""
    forget()
    with using(Tuned(Tables({}, {}))):
        yield
    forget()


@pytest.fixture
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether kernels count as faster than torch's operators. With True, float32 needs no times."""

    def set_faster(faster: bool) -> None:
        monkeypatch.setattr(decision, "beats", lambda *_: faster)
        if faster:
            monkeypatch.setattr(decision, "is_untrusted", lambda *_: False)

    return set_faster


@pytest.fixture
def own_tables(untuned: None) -> Iterator[None]:
    """The user's database is read after all."""
    with using(Platform()):
        yield
