"""Tests of the serving example against a reference loop, with many and with few pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "scarce"), [(2, True), (24, False)])
def test_tokens_match_the_reference_loop(pages: int, scarce: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONSAFEPATH", None)
    program = [sys.executable, "-m", "examples.serving", "--pages", str(pages), "--requests", "5"]
    said = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    match = re.search(r"^0 of (\d+) tokens differ", said.stdout, re.MULTILINE)
    assert match is not None
    assert int(match.group(1)) >= 10
    assert (f"at most {pages} of {pages} pages" in said.stdout) == scarce, said.stdout
    assert ("; 0 requests began anew" not in said.stdout) == scarce, said.stdout
