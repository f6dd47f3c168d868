"""Tests of the installed wheel outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import flashtune

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


IMPORTS = f"""
import importlib, json, pkgutil, sys, time, torch, triton
start = time.process_time()
import flashtune
flashtune.attention, flashtune.plan, flashtune.explain
seconds = time.process_time() - start
loaded = [name for name in {HEAVY!r} if name in sys.modules]
from importlib.util import find_spec
rooms = [name for name in ("tuner", "templates", "db") if find_spec(name)]

def names(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"): continue
        yield importlib.import_module(module.name)
        if module.ispkg: yield from names(importlib.import_module(module.name))

count = sum(1 for module in names(flashtune))
from flashtune.templates.registry import families, template_hash
hashed = [family.name for family in families() if len(template_hash(family.name)) == 32]
file = flashtune.__file__
print(json.dumps(dict(file=file, loaded=loaded, rooms=rooms, seconds=seconds, count=count, hashed=hashed)))
"""


def test_every_module_of_the_wheel_is_importable_and_the_package_quickly(run: Runner, site: Path) -> None:
    """Also checks that no module depends on the checkout or on test dependencies."""
    imported = json.loads(run.program(IMPORTS))
    assert Path(imported["file"]).parent == site / "flashtune"
    assert imported["loaded"] == []
    assert imported["rooms"] == [], "subpackages are no top-level modules"
    assert imported["seconds"] < IMPORT_SECONDS
    assert imported["count"] > 20
    assert "forward_q_outer" in imported["hashed"], "templates are installed"


def test_command_line_starts(run: Runner, site: Path) -> None:
    assert "search" in run.command(site / "bin" / "flashtune", "--help")
    assert "search" in run.command(sys.executable, "-m", "flashtune.tuner.cli", "--help")


PROGRAM = """
import torch, flashtune
from flashtune.dispatch.versions import current_versions
from flashtune.dispatch.tables import tuned_records
q = torch.randn(1, 2, 20, 16, requires_grad=True)
out = flashtune.attention(q, q, q)
out.sum().backward()
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
assert current_versions("forward_masked").flashtune == flashtune.__version__
assert len(tuned_records("nvidia-h200").effective()) > 100
print(flashtune.__file__)
from flashtune.db.creation import upgrade
upgrade("sqlite:///new.sqlite")
"""


@pytest.mark.slow
def test_an_archive_without_metadata_serves_calls(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith("flashtune"):
            (others / path.name).symlink_to(path)
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(flashtune.__file__).parent, copy / "flashtune", ignore=ignored)
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", copy)
    answer = subprocess.run(
        # The interpreter without the packages of the environment.
        [getattr(sys, "_base_executable", sys.executable), "-s", "-c", PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((archive, str(others))),
            "TRITON_INTERPRET": "1",
            "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache"),
        },
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(archive)


DEMO = Path(__file__).parents[2] / "scripts" / "demo.sh"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes the path of machines without a GPU")
def test_demo_prints_its_results_and_paths(tmp_path: Path, own_database: Path) -> None:
    result = subprocess.run(
        [DEMO, Path(sys.executable).parent],
        cwd=tmp_path,
        env={**os.environ, "DEMO_TRIALS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "predicted" in result.stdout
    assert str(own_database) in result.stdout
    rendered = (tmp_path / "out" / "demo_kernel.py").read_text()
    assert re.search(r"^@(triton|gluon)\.jit\ndef forward_\w+\($", rendered, flags=re.MULTILINE)
