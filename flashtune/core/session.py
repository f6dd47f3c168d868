"""`Session`: the caches of a process, which are cleared together.

Modules ask `SESSION` for their caches by name when they are imported. A cache is a dictionary, which a module
keeps, so that a look-up is as fast as possible. Entries are added by `keep`.
"""

import functools
import threading
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


class Session:
    """The caches of a process and the locks that guard them. Compiled kernels stay loaded beyond it.

    Attributes:
        preparing: Held while a call that waits is prepared, so that threads compile its kernels once.
        adding: Held for moments, to add kinds of calls that do not wait.
    """

    def __init__(self) -> None:
        self.preparing = threading.RLock()
        self.adding = threading.RLock()
        self._of_calls: dict[str, dict[Any, Any]] = {}
        self._of_process: dict[str, dict[Any, Any]] = {}
        self._functions: list[Callable[[], None]] = []

    def cache(self, name: str) -> dict[Any, Any]:
        """Returns the cache of this name, of properties of kinds of calls. A new one is empty."""
        return self._of_calls.setdefault(name, {})

    def process_cache(self, name: str) -> dict[Any, Any]:
        """Returns the cache of this name, of results that stay the same in this process."""
        return self._of_process.setdefault(name, {})

    def computed_once(self, function: Callable[[Key], Value]) -> Callable[[Key], Value]:
        """Returns a function of one argument whose results are kept, as by `functools.cache`."""
        cached = functools.cache(function)
        self._functions.append(cached.cache_clear)
        return cached

    def forget(self, owner: str = "") -> None:
        """Clears the caches of kinds of calls, which are then prepared again: all, or those of an owner.

        The names of an owner's caches begin with its name. An owner does not wait for calls in preparation.
        """
        if owner:
            self._clear(owner)
            return
        with self.preparing, self.adding:
            self._clear("")

    def _clear(self, owner: str) -> None:
        # Another thread may add a cache.
        for name, cache in tuple(self._of_calls.items()):
            if name.startswith(owner):
                cache.clear()

    def reset(self) -> None:
        """Clears all caches, as in a new process. Only tests need this."""
        self.forget()
        for cache in self._of_process.values():
            cache.clear()
        for clear in self._functions:
            clear()


SESSION = Session()
