"""Output of commands: JSON for programs, rich tables for terminals, notes on stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from flashtune.core.errors import printable

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from flashtune.db.store import MergeCounts

# Seconds between lines of progress without a terminal.
LINE_SECONDS = 20.0
# Wide enough that no line is folded.
UNFOLDED = 10_000


def print_json(value: Any) -> None:
    """Writes structs, enums and containers as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def note(sentence: str) -> None:
    """Writes a sentence to stderr, so that stdout stays parseable. Writes nothing with --quiet."""
    if not is_set("quiet"):
        warn(sentence)


def warn(sentence: str) -> None:
    """Writes a sentence to stderr, also with --quiet."""
    say(f"flashtune: {sentence}", err=True)


def is_set(flag: str) -> bool:
    """Returns whether a flag of the running command is set: `quiet` or `verbose`."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.meta.get(f"flashtune.{flag}") is True


def shows_progress() -> bool:
    """Returns whether the running command shows progress, which --quiet and --no-progress disable."""
    ctx = click.get_current_context(silent=True)
    return ctx is None or not (ctx.meta.get("flashtune.progress") is False or is_set("quiet"))


def line_width(*, err: bool = False) -> int:
    """Returns the columns of a line of output: COLUMNS, or those of the terminal, or 80 without one.

    Messages on stderr are single lines in a log file, unless COLUMNS is set.
    """
    if err and not sys.stderr.isatty() and "COLUMNS" not in os.environ:
        return UNFOLDED
    return shutil.get_terminal_size().columns


def folded(text: str, indent: str = "", *, err: bool = False) -> str:
    """Returns a text folded at words to the width of a line, with an indent from the second line on.

    Words are not divided, so that paths, URLs and problem keys can be copied.
    """
    return textwrap.fill(
        text,
        line_width(err=err),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def say(sentence: str, indent: str = "", *, err: bool = False) -> None:
    """Writes a sentence to standard output or stderr, folded at words."""
    click.echo(folded(sentence, indent, err=err), err=err)


def command_line() -> str:
    """Returns the command line of the running command, quoted for a shell, without passwords."""
    from flashtune.db.location import without_password

    ctx = click.get_current_context()
    arguments = ctx.meta.get("flashtune.core.arguments", ())
    return shlex.join(["flashtune", *map(without_password, arguments)])


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Returns a function that shows the progress of a phase on stderr.

    Its arguments are the name of the phase, the number of finished steps, and their total. On a terminal each
    phase has a bar. Elsewhere a line is written at intervals.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines()
        return
    with Progress(console=console, transient=True, disable=not shows_progress()) as bars:

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=done, total=total)

        yield show


def progress_lines() -> Callable[[str, int, int], None]:
    """Returns a function that writes progress to stderr, at most one line in twenty seconds."""
    latest = time.monotonic()
    starts: dict[str, tuple[float, int]] = {}

    def show(phase: str, done: int, total: int) -> None:
        nonlocal latest
        now = time.monotonic()
        start, first = starts.setdefault(phase, (now, done))
        if shows_progress() and now - latest >= LINE_SECONDS:
            latest = now
            seconds = (now - start) * (total - done) / max(1, done - first)
            note(f"{phase}: {done} of {total}{f', about {seconds:.0f} s left' if done > first else ''}")

    return show


def write_result(path: Path | None, content: bytes) -> None:
    """Writes a result to a file, or to standard output if the path is None or `-`.

    Raises:
        FlashtuneError: The file cannot be written.
    """
    from flashtune.tuner.tables.table_files import write_file

    if path is None or str(path) == "-":
        click.echo(content.decode(), nl=False)
        return
    write_file(path, content)
    note(f"wrote {path}")


def plain(text: str) -> str:
    """Returns a stored text as one printable line for rich, without markup and control codes."""
    from rich.markup import escape

    return escape(printable(text))


def console() -> Console:
    """Returns a console on stdout, as wide as a line and plain without a terminal."""
    from rich.console import Console

    return Console(width=line_width())


def print_table(out: Console, table: Table) -> None:
    """Prints a table. If it is wider than the console, each row becomes a block of lines `head  cell`."""
    from rich.console import Console
    from rich.table import Table

    if Console(width=UNFOLDED).measure(table).maximum <= out.width:
        out.print(table)
        return
    columns = [(str(column.header), tuple(column.cells)) for column in table.columns]
    for row in range(table.row_count):
        block = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        block.add_column(style="bold")
        block.add_column(overflow="fold")
        for head, cells in columns:
            if cells[row]:
                block.add_row(head, cells[row])
        out.print(block)
        out.print()


def print_heading(out: Console, title: str) -> None:
    """Prints a title with a rule after it, or folded at words if it is too long."""
    if len(title) + 2 <= out.width:
        out.rule(plain(title), align="left")
    else:
        out.print(plain(title))


def grid(
    heads: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[str] = (), *, framed: bool = False
) -> Table:
    """Returns a table. The columns of `right` are right-aligned. Only `framed` tables have lines."""
    from rich.table import Table

    table = Table() if framed else Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def print_rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Prints rows under their heads. Cells that are too long for the terminal are folded at words."""
    console().print(grid(heads, (map(plain, row) for row in rows)))


def quantity(count: int) -> str:
    """Returns a readable number of bytes: `164,120 B`, `1.2 MiB`."""
    if count < 1024 * 1024:
        return f"{count:,} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:,.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def print_counts(counts: MergeCounts, as_json: bool) -> None:
    """Prints the counts of rows added to a database."""
    if as_json:
        print_json(counts)
        return
    say(
        f"{counts.records_added} records are new and {counts.records_known} were known; "
        f"{counts.selections_added} selections are new, {counts.selections_replaced} took the place of "
        f"slower ones and {counts.selections_kept} gave way to the database's own"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown, right-aligned from the second column on."""
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
