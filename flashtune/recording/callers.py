"""Names the module of `flashtune.integrations` for which a thread calls, for explanations."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


_current: ContextVar[str] = ContextVar("caller", default="")


def called_by(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Returns a decorator of functions that call for a module of `flashtune.integrations`."""

    def decorated(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            before = _current.set(name)
            try:
                return function(*args, **kwargs)
            finally:
                _current.reset(before)

        return call

    return decorated


def present_caller() -> str:
    """Returns the module that this thread calls for, or an empty text."""
    return _current.get()
