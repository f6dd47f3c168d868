"""Pages of the documentation whose tables are written by scripts, between marks."""

from __future__ import annotations

from flashtune.errors import UsageError


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
