"""Caches of results that stay the same in a process."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# The number of entries of most caches. Programs have a few kinds of calls, unless each has other lengths.
MANY = 4096


def keep(cache: dict[Key, Value], key: Key, value: Value, limit: int = MANY) -> None:
    """Adds an entry to a cache, which is cleared whole before if it has `limit` entries."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value


class ProcessCaches:
    """The caches of modules below the runtime, so that tests can clear them. Entries are added by `keep`."""

    def __init__(self) -> None:
        self._clear: list[Callable[[], None]] = []

    def cache(self) -> dict[Any, Any]:
        """Returns a new cache, which is empty."""
        cache: dict[Any, Any] = {}
        self._clear.append(cache.clear)
        return cache

    def computed_once(self, function: Callable[[Key], Value]) -> Callable[[Key], Value]:
        """Returns a function of one argument whose results are kept, as by `functools.cache`."""
        cached = functools.cache(function)
        self._clear.append(cached.cache_clear)
        return cached

    def reset(self) -> None:
        """Clears all caches, as in a new process. Only tests need this."""
        for clear in self._clear:
            clear()


CACHES = ProcessCaches()
