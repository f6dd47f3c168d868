"""Tests of the commands of pages: all have valid options, and those that need nothing run."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from flashtune.db.table import dump_table, shipped_table
from flashtune.tuner.cli import main
from scripts.code_blocks import ROOT, Block, code_blocks, pages_with
from tests.tuner.cli.conftest import Run


def commands(block: Block) -> Iterator[list[str]]:
    """Yields the arguments of the block's calls of `flashtune`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ flashtune "):
            yield shlex.split(line, comments=True)[2:]


# The examples of docs/cli.md are those of the commands' help, which have a test of their own.
PAGES = {page: [*code_blocks(ROOT / page)] for page in pages_with("console") if page != "docs/cli.md"}
RUNNABLE = [
    page for page, blocks in PAGES.items() if any(not block.needs and [*commands(block)] for block in blocks)
]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_have_valid_options(page: str) -> None:
    for block in PAGES[page]:
        for arguments in commands(block):
            command: click.Command = main
            rest = list(arguments)
            while isinstance(command, click.Group):
                inner = command.get_command(click.Context(command), rest.pop(0))
                assert inner is not None, (block.place, arguments)
                command = inner
            command.make_parser(click.Context(command)).parse_args(rest)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_commands_of_the_page_run(page: str, run: Run, tmp_path: Path) -> None:
    called = [
        (block.place, arguments) for block in PAGES[page] if not block.needs for arguments in commands(block)
    ]
    table = shipped_table("nvidia-h100")
    assert table is not None
    record = next(record for record in table.records if record.family == "forward_q_outer")
    with contextlib.chdir(tmp_path):
        Path("h100.json").write_bytes(
            dump_table(msgspec.structs.replace(table, records=(record,), receipts=()))
        )
        assert run("import", "h100.json").exit_code == 0
        Path("other.sqlite").write_bytes(Path("flashtune.sqlite").read_bytes())
        for place, arguments in called:
            result = run(*arguments)
            assert result.exit_code == 0, (place, arguments, result.output)
