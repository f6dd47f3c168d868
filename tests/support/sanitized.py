"""Some kernels for a sanitizer."""

from __future__ import annotations

import functools

from benchmarks.sanitizer.points import subjects
from benchmarks.sanitizer.sanitizing import Subject
from flashtune.core.target import find_target

TARGET = find_target("h200")


@functools.cache
def sanitized() -> tuple[Subject, ...]:
    """The shipped kernels of an H200, and two drawn kernels of each family."""
    return subjects(TARGET, 2, 1)
