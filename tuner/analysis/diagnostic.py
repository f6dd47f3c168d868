"""`Finding`: one line of what `flashtune doctor` reports."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        name: What was looked at.
        level: How it came out.
        said: What was found.
        advice: What to do about it; empty where nothing need be done.
    """

    name: str
    level: Level
    said: str
    advice: str = ""
