"""How commands print: JSON for programs, rich tables for people, notes on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.db.store import MergeCounts

# Where the output is no terminal, tables are not squeezed into eighty columns.
PIPE_WIDTH = 200


def print_json(value: Any) -> None:
    """Writes structs, enums and containers as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def printable(text: str) -> str:
    """A text of whatever origin on one line, without control codes."""
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))


def note(sentence: str) -> None:
    """Says something beside the data: on stderr, so that stdout stays parseable."""
    click.echo(f"flashtune: {sentence}", err=True)


def plain(text: str) -> str:
    """A stored text as one printable line for rich: neither markup nor a terminal's control codes."""
    from rich.markup import escape

    return escape(printable(text))


def console() -> Console:
    """A console on stdout, plain where that is no terminal."""
    from rich.console import Console

    probe = Console()
    return probe if probe.is_terminal else Console(width=PIPE_WIDTH)


def quantity(count: int) -> str:
    """Bytes as a person reads them: `164,120 B`, `1.2 MiB`."""
    if count < 1024 * 1024:
        return f"{count:,} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:,.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def print_counts(counts: MergeCounts, as_json: bool) -> None:
    """Says what came into a database."""
    if as_json:
        print_json(counts)
        return
    click.echo(
        f"{counts.records_added} records are new and {counts.records_known} were known; "
        f"{counts.selections_added} selections are new, {counts.selections_replaced} took the place of "
        f"slower ones and {counts.selections_kept} gave way to the database's own"
    )
