"""Files of recorded calls: one JSON line per problem with its number of calls, and no tensor data.

Many processes may write to one file. Each merges its counts under a lock on a second file, and replaces the
file atomically.
"""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.file_lock import alone_with, read_bounded
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem

# The limits of a file. Problems with the fewest calls are omitted.
MAX_LINES = 4096
MAX_FILE_BYTES = 8 * 2**20
MAX_CALLS = 2**53
# The time to wait for another process, which writes a few megabytes in far less.
LOCK_SECONDS = 30.0


class CallCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of calls of one problem.

    Attributes:
        problem: The problem.
        specialization: The specialization that its tensors allowed.
        calls: The number of calls.
    """

    problem: Problem
    specialization: Specialization
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
    """Returns the counts of a file, which may be untrusted.

    Raises:
        UsageError: The file cannot be read, or does not have recorded calls.
    """
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
        raise UsageError(
            f"{path}, line {number}: not a recorded call ({error}); name a file that "
            "flashtune.record_calls wrote"
        ) from error


def known_counts(path: Path) -> tuple[CallCount, ...]:
    """Returns the counts of a file before a write, nothing if the file does not exist.

    Raises:
        UsageError: The file does not have recorded calls, or its folder does not exist.
    """
    if path.exists():
        return read_counts(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot record calls in {path}: there is no such folder, so make it first")
    return ()


def add_counts(path: Path, counts: Iterable[CallCount]) -> None:
    """Merges counts into a file. Creates a missing file.

    Raises:
        UsageError: The file does not have recorded calls, or cannot be written.
    """
    known_counts(path)  # raises a helpful error if the folder of the lock is missing
    try:
        with alone_with(Path(f"{path}.lock"), LOCK_SECONDS):
            lines = (_encoder.encode(count) + b"\n" for count in merged((*known_counts(path), *counts)))
            _replace(path, b"".join(lines))
    except TimeoutError as error:
        raise UsageError(f"another process holds {path}.lock: wait for it, or record elsewhere") from error
    except OSError as error:
        raise UsageError(f"cannot write the recorded calls {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically and preserves its permissions."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with fresh.open("xb") as file:
            file.write(content)
        if path.exists():
            fresh.chmod(stat.S_IMODE(path.stat().st_mode))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
