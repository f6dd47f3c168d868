from __future__ import annotations

import pytest

from benchmarks.documents import filled
from flashtune.core.errors import UsageError

BEGIN, END = "<!-- a -->", "<!-- end of a -->"


def test_only_text_between_the_markers_changes() -> None:
    page = f"# Title\n\n{BEGIN}\nold\nlines\n{END}\n\nThe rest.\n"
    new = filled(page, BEGIN, END, "new")
    assert new == f"# Title\n\n{BEGIN}\nnew\n{END}\n\nThe rest.\n"
    assert filled(new, BEGIN, END, "new") == new


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}\n{BEGIN}"])
def test_page_without_both_markers_is_refused(page: str) -> None:
    with pytest.raises(UsageError, match="put <!-- a --> and <!-- end of a --> where it belongs"):
        filled(page, BEGIN, END, "new")
