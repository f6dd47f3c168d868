"""Launches in Triton's interpreter: one at a time, and without work that has no effect.

The interpreter repeats each int32 operation in int64 for an assertion that only its debug mode has. It also
replaces the functions of `triton.language` at each call between functions of a kernel. The launch has already
replaced them.
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
    """Blocks launches of other threads, and skips work without effect in this one.

    While a kernel runs, the interpreter replaces parts of Triton for all threads.
    """
    from triton.runtime import interpreter

    with _launching:
        builder = interpreter.interpreter_builder
        options, replace = builder.options, interpreter._patch_lang
        known: set[int] = set()

        def replace_once(function: Any) -> Any:
            # The replaced names depend only on the globals of the function's module.
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
