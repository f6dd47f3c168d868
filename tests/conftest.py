"""What all tests share: nothing of the user's is read or written, and GPU tests wait for a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import families

# Timings differ widely between machines, and a failure must come back on the next run.
hypothesis.settings.register_profile("flashtune", deadline=None, derandomize=True)
hypothesis.settings.load_profile("flashtune")

native = families.native

# Triton reads the variable when it is imported, so these tests have a process of their own.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreter"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and what needs the machine to itself beside others."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU")
    if "PYTEST_XDIST_WORKER" in os.environ:
        missing["alone"] = pytest.mark.skip(reason="needs the machine to itself")
    for item in items:
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for rendered kernels, shared by the tests of one process and by those that they start."""
    folder = tmp_path_factory.mktemp("kernels")
    os.environ["FLASHTUNE_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that does not exist yet, in place of the user's."""
    path = tmp_path / "flashtune.sqlite"
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    return path
