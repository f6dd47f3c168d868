"""Launches under Triton's interpreter: one at a time, without work that has no effect.

The interpreter computes each int32 operation once more in int64, for an assertion that only its debug mode
makes. Whenever one function of a kernel calls another, it replaces the functions of `triton.language`,
which the launch has replaced already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

_launching = threading.Lock()


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Holds other threads' launches back and leaves out what has no effect on this one.

    While a kernel runs, the interpreter has parts of Triton replaced, of all threads.
    """
    from triton.runtime import interpreter

    with _launching:
        builder = interpreter.interpreter_builder
        options, replace = builder.options, interpreter._patch_lang
        known: set[int] = set()

        def replace_once(function: Any) -> Any:
            # The replaced names depend on the globals of the function's module alone.
            names = id(function.__globals__)
            if names in known:
                return interpreter._LangPatchScope()
            known.add(names)
            return replace(function)

        builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
        interpreter._patch_lang = replace_once
        try:
            yield
        finally:
            builder.options, interpreter._patch_lang = options, replace
