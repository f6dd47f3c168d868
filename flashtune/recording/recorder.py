"""`record_calls`: counts the calls of each problem in a running program, for `flashtune search --from`.

Calls have no overhead without a recording: executors are wrapped when they are prepared, and the start and
end of a recording clear the call caches. A plan counts its calls only if it was created during a recording.
The replay of a CUDA graph makes no calls and is not counted.
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
from flashtune.core.notices import warn_once
from flashtune.core.problem import Problem
from flashtune.recording.call_log import MAX_LINES, CallCount, add_counts, known_counts

VARIABLE = "FLASHTUNE_RECORD"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.Lock()
_recordings: list[Recording] = []
_forget: list[Callable[[], None]] = []


class Tally:
    """The number of calls of one problem."""

    __slots__ = ("_lock", "calls")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def count(self) -> None:
        """Adds one call."""
        with self._lock:
            self.calls += 1


class Recording:
    """The calls of this process since the start of the recording, bounded in size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tallies: dict[tuple[Problem, Specialization], Tally] = {}
        # A forked child has its parent's counts, and the parent writes them.
        self._process = os.getpid()

    def tally(self, problem: Problem, specialization: Specialization) -> Tally:
        """Returns the tally of a problem. Beyond the limit of problems, the tally is not written."""
        with _lock:
            key = problem, specialization
            if key not in self._tallies and len(self._tallies) >= MAX_LINES:
                return Tally()
            return self._tallies.setdefault(key, Tally())

    def write(self) -> None:
        """Merges the counts into the file.

        Raises:
            UsageError: The file cannot be written.
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
    """Returns whether a recording is active."""
    return bool(_recordings)


def counted(
    serve: Callable[Parameters, Result], problem: Problem, specialization: Specialization
) -> Callable[Parameters, Result]:
    """Returns an executor that counts its calls for all recordings, or `serve` itself without a recording."""
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
    """Registers a function that clears a call cache when a recording starts or ends."""
    _forget.append(forget)


@contextlib.contextmanager
def record_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Counts this process's calls of attention in the context, and merges the counts into a file.

    The file has problems (shapes, types and features), alignment and counts, and no tensor data. Many
    processes may use the same file. Shapes are prepared again after a recording starts or ends, so do not
    start or end one during the capture of a CUDA graph.

    Args:
        path: A file of JSON lines for `flashtune search --from`. A missing file is created.

    Raises:
        UsageError: The file has other content, or cannot be written.
    """
    found = _begin(Path(path))
    try:
        yield
    finally:
        # An interrupted program's calls count too.
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
    """Writes the counts at exit. A failure only emits a warning: no caller could handle an exception."""
    try:
        found.write()
    except UsageError as error:
        warn_once("recording", f"{error}, so this process's calls are not recorded")


def _begin_for_process() -> None:
    """Records this process from now on if the environment variable names a file."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        found = _begin(Path(name))
    except UsageError as error:
        warn_once("recording", f"{error}, as {VARIABLE} asks for: nothing is recorded")
        return
    atexit.register(_write_at_exit, found)


_begin_for_process()
