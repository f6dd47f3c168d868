"""Runs the examples of docs/testing.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/testing.md"


def test_examples_of_the_page_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 4
    exec(compile("\n".join(examples), str(PAGE), "exec"), {})
