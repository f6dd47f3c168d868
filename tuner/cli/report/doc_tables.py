"""Pages of the documentation whose tables are written by scripts, between marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashtune.core.errors import UsageError


def filled(page: str, begin: str, end: str, text: str) -> str:
    """A page with a text on lines of its own between two marks, in place of what stood there.

    Raises:
        UsageError: The page has no such marks.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UsageError(f"the page has no place for this: put {begin} and {end} where it belongs")
    return f"{before}{begin}\n{text}\n{end}{after}"


def with_tables(page: str, texts: Mapping[str, str], script: str) -> str:
    """The page with each text between the comments that name it and its script, where it has these.

    Raises:
        UsageError: A table begins and does not end.
    """
    for name, text in texts.items():
        begin = f"<!-- table {name}: written by {script} -->"
        if begin in page:
            page = filled(page, begin, f"<!-- end of table {name} -->", text)
    return page


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown, numbers to the right of the first column."""
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
