"""Recordings: they count the calls of each problem in a running program, for `flashtune search --from`.

Calls have no overhead without a recording: executors are wrapped when they are prepared, and the start and
end of a recording clear the call caches. A plan counts its calls only if it was created during a recording.
The replay of a CUDA graph makes no calls and is not counted.

A file has one JSON line per problem with its number of calls, and no tensor data. Many processes may write to
one file. Each merges its counts under a lock on a second file, and replaces the file atomically.
"""

import atexit
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.files import alone_with, read_bounded, replace_file
from flashtune.core.kernel import Specialization
from flashtune.core.locks import ModuleLock
from flashtune.core.machine import RECORD_VARIABLE, user_path, variable
from flashtune.core.notices import warn_once
from flashtune.core.problem import Problem

# The limits of a file. Problems with the fewest calls are omitted.
MAX_LINES = 4096
MAX_FILE_BYTES = 8 * 2**20
MAX_CALLS = 2**53
# The time to wait for another process, which writes a few megabytes in far less.
LOCK_SECONDS = 30.0

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CallCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of calls of one problem."""

    problem: Problem
    specialization: Specialization  # The specialization that its tensors allowed.
    calls: Annotated[int, msgspec.Meta(ge=1, le=MAX_CALLS)]


_decoder = msgspec.json.Decoder(CallCount)
_encoder = msgspec.json.Encoder()


def merged(counts: Iterable[CallCount], most: int = MAX_LINES) -> tuple[CallCount, ...]:
    """Returns counts with the calls of equal problems added, by descending calls, at most `most`."""
    calls: dict[tuple[Problem, Specialization], int] = {}
    for count in counts:
        key = count.problem, count.specialization
        calls[key] = min(MAX_CALLS, calls.get(key, 0) + count.calls)
    ranked = sorted(calls.items(), key=lambda item: -item[1])
    return tuple(CallCount(*key, number) for key, number in ranked[:most])


def read_counts(path: Path) -> tuple[CallCount, ...]:
    """Returns the counts of a file, which may be untrusted."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the recorded calls {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the recorded calls {str(path)!r} are not a file name: {error}") from error
    lines = content.splitlines()
    if len(content) > MAX_FILE_BYTES or len(lines) > MAX_LINES:
        raise UsageError(
            f"{path} has more than {MAX_LINES:,} lines or {MAX_FILE_BYTES:,} bytes: no recorded calls do"
        )
    return merged(_decoded(path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def _decoded(path: Path, number: int, line: bytes) -> CallCount:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        # The text may quote a name with control codes.
        quoted = str(error).encode("unicode_escape").decode()
        raise UsageError(
            f"{path}, line {number}: not a recorded call ({quoted}); name a file that "
            "flashtune.record_calls wrote"
        ) from error


def known_counts(path: Path) -> tuple[CallCount, ...]:
    """Returns the counts of a file before a write, nothing if the file does not exist."""
    try:
        if path.exists():
            return read_counts(path)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot record calls in {path}: there is no such folder, so make it first")
    except OSError as error:
        raise UsageError(f"cannot record calls in {path}: {error.strerror}") from error
    return ()


def add_counts(path: Path, counts: Iterable[CallCount]) -> None:
    """Merges counts into a file. Creates a missing file."""
    known_counts(path)  # raises a helpful error if the folder of the lock is missing
    try:
        with alone_with(Path(f"{path}.lock"), LOCK_SECONDS):
            lines = (_encoder.encode(count) + b"\n" for count in merged((*known_counts(path), *counts)))
            replace_file(path, b"".join(lines))
    except TimeoutError as error:
        raise UsageError(f"another process holds {path}.lock: wait for it, or record elsewhere") from error
    except OSError as error:
        raise UsageError(f"cannot write the recorded calls {path}: {error.strerror}") from error


class Tally:
    """The number of calls of one problem."""

    __slots__ = ("_lock", "calls")

    def __init__(self, lock: ModuleLock) -> None:
        self._lock = lock
        self.calls = 0

    def count(self) -> None:
        """Adds one call."""
        with self._lock:
            self.calls += 1


class Recording:
    """The calls of this process since the start of the recording, bounded in size."""

    def __init__(self, path: Path) -> None:
        known_counts(path)
        self._path = path
        self._lock = ModuleLock()
        self._tallies: dict[tuple[Problem, Specialization], Tally] = {}
        # A forked child has its parent's counts, and the parent writes them.
        self._process = os.getpid()

    def tally(self, problem: Problem, specialization: Specialization) -> Tally:
        """Returns the tally of a problem. Beyond the limit of problems, the tally is not written."""
        with self._lock:
            key = problem, specialization
            if key not in self._tallies and len(self._tallies) >= MAX_LINES:
                return Tally(self._lock)
            return self._tallies.setdefault(key, Tally(self._lock))

    def write(self) -> None:
        """Merges the counts into the file."""
        if os.getpid() != self._process:
            return
        with self._lock:
            tallies = tuple(self._tallies.items())
            self._tallies = {}
        counts = [CallCount(*key, tally.calls) for key, tally in tallies if tally.calls]
        if counts:
            add_counts(self._path, counts)


def counted(
    executor: Callable[Parameters, Result],
    recordings: Iterable[Recording],
    problem: Problem,
    specialization: Specialization,
) -> Callable[Parameters, Result]:
    """Returns an executor that counts its calls for all recordings. Without one, returns `executor`."""
    tallies = tuple(recording.tally(problem, specialization) for recording in tuple(recordings))
    if not tallies:
        return executor

    @functools.wraps(executor, updated=())
    def counted_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for tally in tallies:
            tally.count()
        return executor(*args, **kwargs)

    return counted_call


def recordings_of_process() -> tuple[Recording, ...]:
    """Returns the recording that the environment variable asks for, if any. It is written at exit."""
    try:
        name = variable(RECORD_VARIABLE)
        if not name:
            return ()
        recording = Recording(user_path(name, RECORD_VARIABLE))
    except UsageError as error:
        warn_once("recording", f"{error}, as {RECORD_VARIABLE} asks for: nothing is recorded")
        return ()
    atexit.register(_write_at_exit, recording)
    return (recording,)


def _write_at_exit(recording: Recording) -> None:
    """Writes the counts at exit. A failure only emits a warning: no caller could handle an exception."""
    try:
        recording.write()
    except UsageError as error:
        warn_once("recording", f"{error}, so this process's calls are not recorded")
