"""Names the module of `flashtune.integrations` for which a thread calls, for explanations."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Current(threading.local):
    name = ""


_current = _Current()


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


def present_caller() -> str:
    """Returns the module that this thread calls for, or an empty text."""
    return _current.name
