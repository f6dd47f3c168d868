"""`record_calls`: which problems a running program calls and how often, for `flashtune search --from`.

Where nothing is recorded, a call costs nothing more: servers are counted by wrapping them when they are
prepared, and the memos of servers are emptied when recording begins and ends. So a plan counts its calls if
it was made while recording, and the replay of a CUDA graph, which calls nothing, is not counted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from flashtune.core.errors import UsageError
from flashtune.core.kernel import Specialization
from flashtune.core.notices import tell_once
from flashtune.core.problem import Problem
from flashtune.recording.call_log import MAX_LINES, CallCount, add_counts, known_counts

VARIABLE = "FLASHTUNE_RECORD"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.Lock()
_recordings: list[Recording] = []
_forget: list[Callable[[], None]] = []


class Tally:
    """How often one kind of problem was called."""

    __slots__ = ("_lock", "calls")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def count(self) -> None:
        """One call more."""
        with self._lock:
            self.calls += 1


class Recording:
    """What this process called since recording began, bounded in size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tallies: dict[tuple[Problem, Specialization], Tally] = {}
        # A fork has its parent's counts, which the parent writes.
        self._process = os.getpid()

    def tally(self, problem: Problem, specialization: Specialization) -> Tally:
        """The tally of a kind of problem; of one too many, one that is not written."""
        with _lock:
            key = problem, specialization
            if key not in self._tallies and len(self._tallies) >= MAX_LINES:
                return Tally()
            return self._tallies.setdefault(key, Tally())

    def write(self) -> None:
        """Merges what was counted into the file.

        Raises:
            UsageError: It cannot be written.
        """
        if os.getpid() != self._process:
            return
        with _lock:
            tallies = tuple(self._tallies.items())
            self._tallies = {}
        counts = [CallCount(*key, tally.calls) for key, tally in tallies if tally.calls]
        if counts:
            add_counts(self._path, counts)


def recording() -> bool:
    """Whether calls are counted now."""
    return bool(_recordings)


def counted(
    serve: Callable[Parameters, Result], problem: Problem, specialization: Specialization
) -> Callable[Parameters, Result]:
    """A server that counts its calls, for all recordings that there are; without one, the server itself."""
    tallies = tuple(each.tally(problem, specialization) for each in tuple(_recordings))
    if not tallies:
        return serve

    @functools.wraps(serve, updated=())
    def count_and_serve(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for tally in tallies:
            tally.count()
        return serve(*args, **kwargs)

    return count_and_serve


def on_change(forget: Callable[[], None]) -> None:
    """Names what empties a memo of servers, for when recording begins or ends."""
    _forget.append(forget)


@contextlib.contextmanager
def record_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Counts this process's calls of attention while the context lasts, and merges the counts into a file.

    Written are problems (shapes, types and features), alignment and counts; nothing of what tensors hold.
    Many processes may name the same file. Shapes are prepared anew after recording begins or ends, so let
    neither happen while a CUDA graph is being captured.

    Args:
        path: A file of JSON lines, made where there is none; `flashtune search --from` reads it.

    Raises:
        UsageError: There is a file of something else, or none can be written there.
    """
    found = _begin(Path(path))
    try:
        yield
    finally:
        # A program that is interrupted was called all the same.
        _end(found)
        found.write()


def _begin(path: Path) -> Recording:
    known_counts(path)
    found = Recording(path)
    _recordings.append(found)
    _forget_servers()
    return found


def _end(found: Recording) -> None:
    _recordings.remove(found)
    _forget_servers()


def _forget_servers() -> None:
    for forget in _forget:
        forget()


def _write_at_exit(found: Recording) -> None:
    """A program that ends is told in a warning, not by an exception in its last moments."""
    try:
        found.write()
    except UsageError as error:
        tell_once("recording", f"{error}, so this process's calls are not recorded")


def _begin_for_process() -> None:
    """Records this process from now on, where the environment names a file."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        found = _begin(Path(name))
    except UsageError as error:
        tell_once("recording", f"{error}, as {VARIABLE} asks for: nothing is recorded")
        return
    atexit.register(_write_at_exit, found)


_begin_for_process()
