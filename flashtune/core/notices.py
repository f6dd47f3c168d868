"""What the runtime tells its user: once per process and matter, as a warning."""

from __future__ import annotations

import threading
import warnings

from flashtune.core.problem import Problem
from flashtune.core.shape_format import shape_text

_told: set[str] = set()
_telling = threading.Lock()


class FlashtuneWarning(UserWarning):
    """flashtune serves a call otherwise than one would expect."""


def tell_once(matter: str, message: str) -> None:
    """Warns, unless this process was already told of the matter."""
    with _telling:
        if matter in _told:
            return
        _told.add(matter)
    warnings.warn(message, FlashtuneWarning, stacklevel=3)


def forget_told() -> None:
    """Every matter is news again."""
    with _telling:
        _told.clear()


def search_command(problem: Problem) -> str:
    """The command that tunes a problem."""
    return f'flashtune search --shape "{shape_text(problem)}"'
