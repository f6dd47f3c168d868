import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.target import find_target
from flashtune.db.store import Store, open_store
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import FamilySpace, SearchTask

# Worker processes import the fakes by name, as the tests do; last, so that nothing is shadowed.
ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "search.sqlite")) as opened:
        yield opened


@pytest.fixture
def healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes find nothing wrong, however busy the machine of the tests is."""
    from flashtune.tuner.execution import machine_probe
    from tests.tuner.search import fakes

    monkeypatch.setattr(machine_probe, "look_for_fault", fakes.nothing_wrong)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def scope() -> SearchTask:
    from tests.tuner.search.fakes import FAMILY, a_problem, a_space

    return SearchTask(
        a_problem(), find_target("h100"), Specialization(), (FamilySpace(find_family(FAMILY), a_space()),)
    )
