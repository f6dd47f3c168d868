"""The switch that rewrites the golden checksums: `pytest tests/templates --update-golden`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from the templates as they are"
    )


@pytest.fixture
def updates_golden(request: pytest.FixtureRequest) -> bool:
    """Whether checksums are written before they are compared."""
    # Unknown where the whole suite runs: pytest then reads this file after the command line.
    return bool(request.config.getoption("--update-golden", default=False))
