"""Writes generated tables into pages of the documentation, between markers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashtune.core.errors import UsageError


def filled(page: str, begin: str, end: str, text: str) -> str:
    """Returns a page with the lines between two markers replaced by a text.

    Raises:
        UsageError: The page lacks the markers.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UsageError(f"the page has no place for this: put {begin} and {end} where it belongs")
    return f"{before}{begin}\n{text}\n{end}{after}"


def with_tables(page: str, texts: Mapping[str, str], script: str) -> str:
    """Returns the page with each text between the comments with its name and script, if it has them.

    Raises:
        UsageError: A table begins and does not end.
    """
    for name, text in texts.items():
        begin = f"<!-- table {name}: written by {script} -->"
        if begin in page:
            page = filled(page, begin, f"<!-- end of table {name} -->", text)
    return page


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown, right-aligned from the second column on."""
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
