"""Tests of the Python code of pages on a GPU."""

from pathlib import Path

import pytest
import torch

from scripts.code_blocks import PYTHON, ROOT, code_blocks, pages_with, run_blocks
from tests.gpu.marks import SERVED

pytestmark = SERVED


# The tutorial counts accesses, which only the interpreter can do.
@pytest.mark.parametrize("page", [page for page in pages_with(*PYTHON) if "tutorial" not in page])
def test_python_code_of_the_page_runs_on_a_gpu(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.device("cuda"):
        run_blocks(block for block in code_blocks(ROOT / page) if block.needs in ("", "gpu"))
