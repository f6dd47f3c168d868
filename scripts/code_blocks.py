"""Runs the Python code of pages.

    TRITON_INTERPRET=1 python -m scripts.code_blocks docs/tutorial.md

The blocks of a page run in order and share their names. A `pycon` block must print the output that it shows.
Comments say more:

- `<!-- needs: THING -->` above a block: it runs only where there is this thing, for example a `gpu`.
- `<!-- from: FILE -->` above a block: it is a part of this file, and does not run.
- `<!-- run: CODE -->`: this code runs where it stands, for example to define names that the blocks use.
"""

import argparse
import doctest
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md")
PYTHON = ("python", "pycon")
BLOCK = re.compile(
    r"(?:^<!-- (?:needs: (?P<needs>[^\n]+?)|from: (?P<source>[^\n]+?)) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$"
    r"|^<!-- run:\n(?P<setup>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """One block of code of a page."""

    place: str  # Page and line, as `docs/guide.md:10`.
    line: int  # The line before its first one, counted from 1.
    language: str
    text: str
    needs: str  # The thing that it needs, or empty.
    source: str  # The file that it quotes, or empty.


def pages() -> list[str]:
    """Returns the paths of all pages, relative to the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern))


def pages_with(*languages: str) -> list[str]:
    """Returns the pages that have blocks of one of these languages."""
    return [
        page for page in pages() if any(block.language in languages for block in code_blocks(ROOT / page))
    ]


def code_blocks(path: Path) -> Iterator[Block]:
    """Yields the blocks of a page; code in comments has the language `python`."""
    page = path.read_text(encoding="utf-8")
    for match in BLOCK.finditer(page):
        group = "text" if match["setup"] is None else "setup"
        line = page.count("\n", 0, match.start(group))
        language = match["language"] or "python"
        yield Block(
            f"{path}:{line + 1}", line, language, match[group], match["needs"] or "", match["source"] or ""
        )


def run_blocks(blocks: Iterable[Block]) -> None:
    """Runs blocks of Python in order.

    Raises:
        AssertionError: A block prints another output than it shows.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.source:
            continue
        if block.language == "python":
            # Error messages have the lines of the page.
            exec(compile("\n" * block.line + block.text, block.place, "exec"), names)  # noqa: S102
        elif block.language == "pycon":
            _run_session(block, names)


def _run_session(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, block.place, block.place, block.line)
    test.globs = names
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    if runner.run(test, out=report.append, clear_globs=False).failed:
        raise AssertionError("".join(report))


def main() -> None:
    """Runs pages, without the blocks that need something."""
    parser = argparse.ArgumentParser(description="Runs the Python code of pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        run_blocks(block for block in code_blocks(page) if not block.needs)
        print(f"{page}: all blocks ran", file=sys.stderr)


if __name__ == "__main__":
    main()
