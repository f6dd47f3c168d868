"""Caches with a limit."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# The number of entries of most caches. Programs have a few kinds of calls, unless each has other lengths.
MANY = 4096


def keep(cache: dict[Key, Value], key: Key, value: Value, limit: int = MANY) -> None:
    """Adds an entry to a cache, which is cleared whole before if it has `limit` entries."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value
