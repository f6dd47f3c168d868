"""Warnings of the runtime, each at most once per process and subject; and commands in messages."""

import re
import warnings

from flashtune.core.canonical import shape_text
from flashtune.core.errors import Printable
from flashtune.core.problem import Problem

# The subjects of warnings, which are few.
_seen_messages: dict[str, object] = {}


class FlashtuneWarning(Printable, UserWarning):
    """The runtime does not work as expected, for example because it uses a fallback."""


def warn_once(matter: str, message: str) -> None:
    """Emits a warning, unless this process has already warned about the subject."""
    first = object()
    # One atomic operation, so that only one of several threads warns.
    if _seen_messages.setdefault(matter, first) is first:
        warnings.warn(message, FlashtuneWarning, stacklevel=3)


def search_command(problem: Problem) -> str:
    """Returns the command that tunes a problem."""
    return f'flashtune search --shape "{shape_text(problem)}"'


def folded_command(command: str, width: int) -> str:
    """Returns a command line folded between its words to a width, so that a shell reads it as one command."""
    lines: list[str] = []
    for space, word in re.findall(r"""(\s*)((?:'[^']*'|"[^"]*"|\S)+)""", command):
        if lines and len(lines[-1]) + len(space) + len(word) + len(" \\") <= width:
            lines[-1] += space + word
        else:
            lines.append(f"  {word}" if lines else word)
    return " \\\n".join(lines)
