"""The canonical form of a kernel's source: the part of the text that decides what runs.

Digests and template versions are computed over this form. A changed comment, docstring or header then leaves
both unchanged. The lexer is our own, because those of the standard library differ between Python versions:
3.12 splits f-strings into tokens, and `ast.dump` of one file differs between 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

# A template engine's tag: kept in templates, and never found in Python.
_JINJA_TAG = r"\{%.*?%\}|\{\{.*?\}\}|\{\#.*?\#\}"
_NO_TAG = r"(?!)"

# Functions that make a rendered file usable alone. The runtime never calls them. Python evaluates defaults
# on import, so that a signature with anything but names and constants counts.
_WRAPPER = re.compile(rf"def attention(?:_backward)?\((?:{_JINJA_TAG}|[\w\s,=*])*\):", re.DOTALL)

# Line ends and encodings that the lexer does not know but Python does.
_UNUSUAL = "\r\f\0\ufeff"
_ENCODING = re.compile(r"(?:.*\n)?[ \t]*#.*?coding[:=]")


def _lexer(tag: str) -> re.Pattern[str]:
    # No two alternatives match at the same character. The most frequent one comes first, for speed.
    return re.compile(
        rf"""
        (?P<code>[^\s"'\#\\(){{}}\[\]]++(?:[ ]++[^\s"'\#\\(){{}}\[\]]++)*+)
        | (?P<tag>{tag})
        | (?P<string>
            \"\"\"(?:\\.|{tag}|(?!\"\"\")[^\\])*+(?:\"\"\"|\\?\Z)
            | '''(?:\\.|{tag}|(?!''')[^\\])*+(?:'''|\\?\Z)
            | "(?:\\.|{tag}|[^"\\\n])*+(?:"|(?=\n)|\\?\Z)
            | '(?:\\.|{tag}|[^'\\\n])*+(?:'|(?=\n)|\\?\Z)
          )
        | (?P<comment>\#(?:{tag}|[^\n])*+)
        | (?P<newline>\n)
        | (?P<open>[(\[{{])
        | (?P<close>[)\]}}])
        | (?P<space>[ \t]+)
        | (?P<other>\\\n | .)
        """,
        re.VERBOSE | re.DOTALL,
    )


# Strings with replacement fields; from Python 3.12 on a field may hold quotes and comments of its own.
_FORMATTED = re.compile(
    r"""\b(?:[fFtT][rR]?|[rR][fFtT])(?P<quote>\"{3}|'{3}|"|')(?P<text>(?:\\.|(?!(?P=quote)).)*+)""", re.DOTALL
)
_PYTHON = _lexer(_NO_TAG)
_TEMPLATE = _lexer(_JINJA_TAG)
_CONTROL_TAG = re.compile(r"\{%.*?%\}", re.DOTALL)


@functools.lru_cache(maxsize=64)
def canonical_source(source: str) -> str:
    """Returns a Python source without comments, docstrings, blank lines and stand-alone wrappers.

    A string that is a whole statement counts as a docstring. Every other string is kept as it is, inline PTX
    included. The result is for comparison; it need not be valid Python. A source with a carriage return,
    a form feed, a null character, a byte-order mark or an encoding declaration is returned unchanged.
    """
    if any(sign in source for sign in _UNUSUAL) or _ENCODING.match(source):
        return source
    if any(map(_may_nest, _FORMATTED.finditer(source))):
        return source
    return "\n".join(_statements(source, _PYTHON))


def _may_nest(string: re.Match[str]) -> bool:
    """Whether a replacement field holds a quote, a comment or a line end, or does not end in the string."""
    depth = 0
    for part in re.finditer(r"\{\{|\}\}|[{}]|[\"'\#\\\n]", string["text"]):
        sign = part.group()
        if depth == 0:
            depth = int(sign == "{")
        elif sign in {"{", "{{"}:
            depth += len(sign)
        elif sign in {"}", "}}"}:
            depth = max(depth - len(sign), 0)
        else:
            return True
    return depth > 0


def canonical_template(text: str) -> str:
    """Returns a Jinja template of Python code likewise; control tags count wherever they occur."""
    return "\n".join(_statements(text, _TEMPLATE))


def _statements(text: str, lexer: re.Pattern[str]) -> Iterator[str]:
    """The logical lines that count. Indentation is kept; layout within brackets is not."""
    in_wrapper = decorated = False
    for line, is_string in _logical_lines(text, lexer):
        indented = line[0] in " \t"
        if in_wrapper:
            in_wrapper = indented or line.startswith("{%")
        if not in_wrapper and not decorated and _WRAPPER.match(line):
            in_wrapper = True
        # A decorator's function is no wrapper: without it the decorator would apply to the next one.
        decorated = line.startswith("@")
        if in_wrapper or is_string:
            yield from _control_tags(line, lexer)
        else:
            yield line


def _control_tags(text: str, lexer: re.Pattern[str]) -> list[str]:
    return _CONTROL_TAG.findall(text) if lexer is _TEMPLATE else []


def _logical_lines(text: str, lexer: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Logical lines without comments, and whether each is a string alone."""
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
            # A control tag within a comment decides about the lines after it too.
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
            parts.append(space + value)
            kinds.append(kind)
            space = ""
    if parts:
        yield "".join(parts), kinds == ["string"]
