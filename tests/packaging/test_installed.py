"""Tests of the installed wheel outside of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.slow]

# Packages that a program that only calls attention must not import.
HEAVY = ("alembic", "click", "jinja2", "optuna", "rich", "sqlalchemy")
# Processor time over torch and triton: several times what it takes, since machines differ.
IMPORT_SECONDS = 0.25


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Runner:
    """Runs a command on the installed wheel, in an empty folder."""
    return Runner(site, tmp_path)


class Runner:
    """Starts processes that see the wheel before the checkout."""

    def __init__(self, site: Path, folder: Path) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        self._folder = folder

    def command(self, *arguments: str | Path) -> str:
        result = subprocess.run(
            arguments, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=1200
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def program(self, code: str) -> str:
        return self.command(sys.executable, "-c", code)


def test_import_uses_only_the_package_of_the_wheel_and_is_fast(run: Runner, site: Path) -> None:
    imported = json.loads(
        run.program(
            "import json, sys, time, torch, triton\n"
            "start = time.process_time()\n"
            "import flashtune\n"
            "flashtune.attention, flashtune.plan, flashtune.explain\n"
            "seconds = time.process_time() - start\n"
            f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
            "from importlib.util import find_spec\n"
            "rooms = [name for name in ('tuner', 'templates', 'db') if find_spec(name)]\n"
            "results = {'file': flashtune.__file__, 'loaded': loaded, 'rooms': rooms, 'seconds': seconds}\n"
            "print(json.dumps(results))"
        )
    )
    assert Path(imported["file"]).parent == site / "flashtune"
    assert imported["loaded"] == []
    assert imported["rooms"] == [], "subpackages are no top-level modules"
    assert imported["seconds"] < IMPORT_SECONDS


def test_every_module_is_importable_and_templates_are_installed(run: Runner) -> None:
    """Also checks that no module depends on the checkout or on test dependencies."""
    code = (
        "import importlib, pkgutil, flashtune\n"
        "def names(package):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        if module.name.endswith('__main__'): continue\n"
        "        yield importlib.import_module(module.name)\n"
        "        if module.ispkg: yield from names(importlib.import_module(module.name))\n"
        "print(sum(1 for module in names(flashtune)))\n"
        "from flashtune.templates.registry import families, template_hash\n"
        "print(*(family.name for family in families() if len(template_hash(family.name)) == 32))"
    )
    count, families = run.program(code).splitlines()
    assert int(count) > 20
    assert "forward_q_outer" in families.split()


def test_command_line_starts(run: Runner, site: Path) -> None:
    assert "search" in run.command(site / "bin" / "flashtune", "--help")
    assert "search" in run.command(sys.executable, "-m", "flashtune.tuner.cli", "--help")
