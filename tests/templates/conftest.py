"""The switch that rewrites the golden checksums: `pytest tests/templates --update-golden`."""

from collections.abc import Callable, Iterator

import pytest

from flashtune.templates import registry, rendering
from flashtune.templates.registry import template_hash

ReadBy = Callable[[Callable[[str], str]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from the templates as they are"
    )


@pytest.fixture
def updates_golden(request: pytest.FixtureRequest) -> bool:
    """Whether checksums are written before they are compared."""
    # Unknown where the whole suite runs: pytest then reads this file after the command line.
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadBy]:
    """Lets a function read the templates."""

    def use(reader: Callable[[str], str]) -> None:
        monkeypatch.setattr(registry, "_read", reader)
        monkeypatch.setattr(rendering, "_read_template", reader)
        forget()

    def forget() -> None:
        template_hash.cache_clear()
        rendering._environment.cache_clear()

    yield use
    monkeypatch.undo()
    forget()
