"""Tests of the removal of rows that explain absent names."""

from flashtune.templates.docstring_rows import remove_absent_rows

SOURCE = '''"""Computes a sum.

Config       lpt True
Names
  x, y       numbers
  z          a number that
             the code lacks
  *_tile     a block
  *_desc     a descriptor
Tunables
  BLOCK      numbers of a block
  WIDTH      columns: absent
  lpt        the longest first
  packed     not set
  maxnreg    not set: absent
"""

BLOCK = 64


def add(x, y):
    """Returns z and WIDTH.

    x   a number
    w   a number
    """
    # A z.
    q_tile = """
    name   code
    """
    return x + y, q_tile
'''


def test_rows_of_absent_names_are_removed() -> None:
    result = remove_absent_rows(SOURCE, {"LPT": True, "PACKED": False})
    removed = [line for line in SOURCE.splitlines() if line not in result.splitlines()]
    assert [line.split()[0] for line in removed] == ["z", "the", "*_desc", "WIDTH", "packed", "maxnreg", "w"]
    kept = [line for line in SOURCE.splitlines() if line not in removed]
    assert result.splitlines() == kept


def test_a_row_needs_all_of_its_names() -> None:
    source = '"""Adds.\n\n  x, y   numbers\n  x      a number\n"""\n\nx = 1\n'
    assert remove_absent_rows(source, {}) == '"""Adds.\n\n  x      a number\n"""\n\nx = 1\n'


def test_comments_and_docstrings_are_no_code() -> None:
    source = '"""Uses y.\n\n  y   a number\n"""\n\n# y\nx = 1  # y\n'
    assert "a number" not in remove_absent_rows(source, {})


def test_other_strings_are_unchanged() -> None:
    source = 'x = 1\ny = """\n  z   text\n"""\n'
    assert remove_absent_rows(source, {}) == source
