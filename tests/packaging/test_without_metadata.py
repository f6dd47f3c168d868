"""Tests of flashtune without metadata, in an archive."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import flashtune

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
