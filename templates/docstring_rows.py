"""Removes rows that explain absent names from the docstrings of a rendered source.

A row has names, at least two spaces, and a text, which may go on in lines that are indented further:

    q, k           [batch, heads, seqlen, head_dim]
    *_desc         TMA descriptor

A row stays if each of its names occurs in the code or is a flag that is set. `*` is any part of a name.
Templates therefore explain every name and every flag, those that do not occur together in rows of their own.
"""

import re
from collections.abc import Mapping

# Docstrings begin with a capital letter, other strings of whole lines do not.
DOCSTRING = re.compile(r'^ *"""[A-Z].*?"""$', re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"#.*")
ROW = re.compile(r"^( +)([\w*]+(?:, [\w*]+)*) {2,}\S.*\n(?:\1 +\S.*\n)*", re.MULTILINE)


def remove_absent_rows(source: str, flags: Mapping[str, bool]) -> str:
    """Returns a source without rows that explain absent names. Flags have names in capital letters."""
    code = COMMENT.sub("", DOCSTRING.sub("", source))
    names = " ".join({*re.findall(r"\w+", code), *(name.lower() for name, is_set in flags.items() if is_set)})

    def row_if_present(row: re.Match[str]) -> str:
        patterns = (name.replace("*", r"\w*") for name in row[2].split(", "))
        return row[0] if all(re.search(rf"\b{pattern}\b", names) for pattern in patterns) else ""

    return DOCSTRING.sub(lambda docstring: ROW.sub(row_if_present, docstring[0]), source)
