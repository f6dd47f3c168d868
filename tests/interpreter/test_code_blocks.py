"""Tests of the Python code of pages, in the interpreter."""

from pathlib import Path

import pytest

from scripts.code_blocks import PYTHON, ROOT, code_blocks, pages_with, run_blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(*PYTHON))
@pytest.mark.usefixtures("fresh_runtime")
def test_python_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(block for block in code_blocks(ROOT / page) if not block.needs)


def test_block_with_another_output_than_shown_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n```\n\n```pycon\n>>> x + 1\n3\n```\n")
    with pytest.raises(AssertionError, match=r'page.md:8", line 8'):
        run_blocks(code_blocks(page))


def test_code_in_comments_runs_and_marked_blocks_are_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run:\nx = 1\n-->\n\n<!-- needs: gpu -->\n```python\nx += 1\n```\n")
    blocks = list(code_blocks(page))
    assert [(block.language, block.needs, block.text) for block in blocks] == [
        ("python", "", "x = 1\n"),
        ("python", "gpu", "x += 1\n"),
    ]
