"""Some kernels that a sanitizer would be given."""

from __future__ import annotations

import functools

from flashtune.target import find_target
from flashtune.tuner.sanitizing import Subject
from flashtune.tuner.sanitizing_points import subjects

TARGET = find_target("h200")


@functools.cache
def sanitized() -> tuple[Subject, ...]:
    """What ships for an H200, and two drawn kernels of each family."""
    return subjects(TARGET, 2, 1)
