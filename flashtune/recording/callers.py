"""Stores which module of `flashtune.integrations` called, by problem, for explanations."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from flashtune.core.session import SESSION, keep

if TYPE_CHECKING:
    from flashtune.core.problem import Problem

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Current(threading.local):
    name = ""


_current = _Current()
_names: dict[Problem, str] = SESSION.cache("callers")


def called_by(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Returns a decorator of functions that call for a module of `flashtune.integrations`."""

    def decorated(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            before, _current.name = _current.name, name
            try:
                return function(*args, **kwargs)
            finally:
                _current.name = before

        return call

    return decorated


def note_caller(problem: Problem, name: str = "") -> None:
    """Stores the caller of a problem: `name`, or else the module that this thread calls for, if any."""
    name = name or _current.name
    if name:
        keep(_names, problem, name)


def caller_of(problem: Problem) -> str:
    """Returns the module that last prepared calls of a problem, or an empty text."""
    return _names.get(problem, "")
