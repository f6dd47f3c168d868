"""The canonical form of rendered sources and templates, which digests and template versions hash.

A changed comment, docstring or header does not change the form. The module has its own lexer, because those
of the standard library differ between Python versions: 3.12 splits f-strings into tokens, and `ast.dump` of
one file differs between 3.11, 3.12 and 3.13. Its patterns have no possessive quantifiers and no atomic
groups, which Python before 3.11.5 matches wrongly. It imports the standard library only, so that any Python
can run it alone.
"""

import re
from collections.abc import Iterator

# A Jinja tag. Templates have them, Python sources do not.
_JINJA_TAG = r"\{%.*?%\}|\{\{.*?\}\}|\{\#.*?\#\}"

# Functions that make a rendered file usable alone. The runtime never calls them. Python evaluates defaults
# on import, so a signature with anything but names and constants is part of the digest.
_WRAPPER = re.compile(rf"def attention(?:_backward)?\((?:{_JINJA_TAG}|[\w\s,=*])*\):", re.DOTALL)

# All that templates write. Python and its tools disagree on other characters: some end a line for
# `str.splitlines` or for the parser only, and some change the indentation.
_PLAIN = re.compile(r"[ -~\n]*")
_ENCODING = re.compile(r"(?:.*\n)?[ \t]*#.*?coding[:=]")

# The prefix of a string with replacement fields, at the end of the text before it.
_PREFIX = re.compile(r"\b(?:[fFtT][rR]?|[rR][fFtT])$")
# From Python 3.12 on, a field may contain quotes, comments, line ends and other fields.
_PLAIN_FIELDS = re.compile(r"(?:\{\{|\}\}|\{[^{}\"'\#\\\n]*\}|[^{}\\\n])*")


def _lexer(tag: str) -> re.Pattern[str]:
    # No two alternatives match at the same character, but for a tag and its brace. The most frequent one is
    # first, for speed. A string ends at its quote or where its line or the text ends, so that no repetition
    # is ever tried again with fewer characters.
    brace = rf"{tag}|\{{" if tag else r"\{"
    return re.compile(
        rf"""
        (?P<code>[^\s"'\#\\(){{}}\[\]]+(?:[ ]+[^\s"'\#\\(){{}}\[\]]+)*)
        {f"| (?P<tag>{tag})" if tag else ""}
        | (?P<string>
            \"\"\"(?:[^"\\{{]+|\\.|{brace}|"(?!""))*(?:\"\"\"|\\?\Z)
            | '''(?:[^'\\{{]+|\\.|{brace}|'(?!''))*(?:'''|\\?\Z)
            | "(?:[^"\\\n{{]+|\\.|{brace})*(?:"|(?=\n)|\\?\Z)
            | '(?:[^'\\\n{{]+|\\.|{brace})*(?:'|(?=\n)|\\?\Z)
          )
        | (?P<comment>\#(?:[^\n{{]+|{brace})*)
        | (?P<newline>\n)
        | (?P<open>[(\[{{])
        | (?P<close>[)\]}}])
        | (?P<space>[ \t]+)
        | (?P<other>\\\n | .)
        """,
        re.VERBOSE | re.DOTALL,
    )


_PYTHON = _lexer("")
_TEMPLATE = _lexer(_JINJA_TAG)
_CONTROL_TAG = re.compile(r"\{%.*?%\}", re.DOTALL)


def canonical_source(source: str) -> str:
    """Returns a Python source without comments, docstrings, blank lines and stand-alone wrappers.

    A string that is a whole statement counts as a docstring. All other strings are unchanged, inline PTX too.
    The result is for comparison; it need not be valid Python. A source that no template writes is returned
    unchanged: one with characters beyond printable ASCII and line feeds, with an encoding declaration, or
    with replacement fields that not all Python versions read alike.
    """
    if not _PLAIN.fullmatch(source) or _ENCODING.match(source):
        return source
    try:
        return "\n".join(_statements(source, _PYTHON))
    except _NestingError:
        return source


class _NestingError(Exception):
    """A replacement field may contain a string, a comment or another field."""


def _may_nest(before: str, string: str) -> bool:
    """Returns whether a string has replacement fields that not all Python versions read alike.

    `before` is the text before the string, which may end with the string's prefix. `string` has its quotes.
    """
    quote = 3 if string[:3] in {'"""', "'''"} else 1
    return bool(_PREFIX.search(before)) and not _PLAIN_FIELDS.fullmatch(string[quote:-quote])


def canonical_template(text: str) -> str:
    """Returns a Jinja template of Python code in canonical form. Control tags are kept everywhere."""
    return "\n".join(_statements(text, _TEMPLATE))


def _statements(text: str, lexer: re.Pattern[str]) -> Iterator[str]:
    """Yields the logical lines of the digest: indentation is kept, layout within brackets is not."""
    in_wrapper = decorated = False
    for line, is_string in _logical_lines(text, lexer):
        indented = line[0] in " \t"
        if in_wrapper:
            in_wrapper = indented or line.startswith("{%")
        if not in_wrapper and not decorated and _WRAPPER.match(line):
            in_wrapper = True
        # A decorated function is not a wrapper: without it the decorator would apply to the next function.
        decorated = line.startswith("@")
        if in_wrapper or is_string:
            yield from _control_tags(line, lexer)
        else:
            yield line


def _control_tags(text: str, lexer: re.Pattern[str]) -> list[str]:
    return _CONTROL_TAG.findall(text) if lexer is _TEMPLATE else []


def _logical_lines(text: str, lexer: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Yields logical lines without comments, and whether each is only a string."""
    parts: list[str] = []
    kinds: list[str] = []
    space = ""
    depth = 0
    for token in lexer.finditer(text):
        kind, value = str(token.lastgroup), token.group()
        if kind == "tag" and value.startswith("{#"):
            continue
        if kind == "space":
            space = space or value
        elif kind == "comment":
            # A control tag in a comment affects the lines after it too.
            tags = _control_tags(value, lexer)
            parts += tags
            kinds += ["tag"] * len(tags)
        elif kind == "newline" and depth > 0:
            space = "\n"
        elif kind == "newline":
            if parts:
                yield "".join(parts), kinds == ["string"]
            parts, kinds, space = [], [], ""
        else:
            depth = max(depth + (kind == "open") - (kind == "close"), 0)
            if (
                kind == "string"
                and lexer is _PYTHON
                and _may_nest("" if space or not parts else parts[-1], value)
            ):
                raise _NestingError
            parts.append(space + value)
            kinds.append(kind)
            space = ""
    if parts:
        yield "".join(parts), kinds == ["string"]
