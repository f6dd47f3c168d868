"""Warnings of the runtime, each at most once per process and subject."""

from __future__ import annotations

import threading
import warnings

from flashtune.core.canonical import shape_text
from flashtune.core.errors import Printable
from flashtune.core.problem import Problem

_seen_messages: set[str] = set()
_telling = threading.Lock()


class FlashtuneWarning(Printable, UserWarning):
    """The runtime does not work as expected, for example because it uses a fallback."""


def warn_once(matter: str, message: str) -> None:
    """Emits a warning, unless this process has already warned about the subject."""
    with _telling:
        if matter in _seen_messages:
            return
        _seen_messages.add(matter)
    warnings.warn(message, FlashtuneWarning, stacklevel=3)


def search_command(problem: Problem) -> str:
    """Returns the command that tunes a problem."""
    return f'flashtune search --shape "{shape_text(problem)}"'
