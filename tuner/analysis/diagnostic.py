"""`Finding`: one line of the report of `flashtune doctor`."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        name: Subject of the check.
        level: Result.
        said: The finding as text.
        advice: The remedy; empty if none is needed.
    """

    name: str
    level: Level
    said: str
    advice: str = ""
