"""Files of what programs called: one problem a line as JSON, with how often; nothing of any tensor.

Many processes may write to one file, at once or one after the other: each merges its counts into it
under a lock beside the file, and puts a whole new file in the place of the old one.
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

# Of problems beyond these the least called are left out: a few megabytes.
MAX_LINES = 4096
MAX_FILE_BYTES = 8 * 2**20
MAX_CALLS = 2**53
# A process that ends writes a file of a few megabytes in far less.
LOCK_SECONDS = 30.0


class CallCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of problem that programs called.

    Attributes:
        problem: What they asked for.
        specialization: What could be assumed of their tensors.
        calls: How often.
    """

    problem: Problem
    specialization: Specialization
    calls: Annotated[int, msgspec.Meta(ge=1, le=MAX_CALLS)]


_decoder = msgspec.json.Decoder(CallCount)
_encoder = msgspec.json.Encoder()


def merged(counts: Iterable[CallCount], most: int = MAX_LINES) -> tuple[CallCount, ...]:
    """Counts of the same as one, the most called first; at most so many."""
    calls: dict[tuple[Problem, Specialization], int] = {}
    for count in counts:
        key = count.problem, count.specialization
        calls[key] = min(MAX_CALLS, calls.get(key, 0) + count.calls)
    ranked = sorted(calls.items(), key=lambda item: -item[1])
    return tuple(CallCount(*key, number) for key, number in ranked[:most])


def read_counts(path: Path) -> tuple[CallCount, ...]:
    """The counts of a file, of whatever origin.

    Raises:
        UsageError: It cannot be read, or is no such file.
    """
    try:
        content = read_bounded(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the recorded calls {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the recorded calls {str(path)!r} are no file name: {error}") from error
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
            f"{path}, line {number}: this is no recorded call ({error}); name a file that "
            "flashtune.record_calls wrote"
        ) from error


def known_counts(path: Path) -> tuple[CallCount, ...]:
    """The counts of a file that is to be written: none where there is no file yet.

    Raises:
        UsageError: There is a file that holds no recorded calls, or no folder to write one to.
    """
    if path.exists():
        return read_counts(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot record calls in {path}: there is no such folder, so make it first")
    return ()


def add_counts(path: Path, counts: Iterable[CallCount]) -> None:
    """Merges counts into a file, which need not exist yet.

    Raises:
        UsageError: There is a file that holds no recorded calls, or none can be written there.
    """
    known_counts(path)  # says what to do where there is no folder for a lock
    try:
        with alone_with(Path(f"{path}.lock"), LOCK_SECONDS):
            lines = (_encoder.encode(count) + b"\n" for count in merged((*known_counts(path), *counts)))
            _replace(path, b"".join(lines))
    except TimeoutError as error:
        raise UsageError(f"another process holds {path}.lock: wait for it, or record elsewhere") from error
    except OSError as error:
        raise UsageError(f"cannot write the recorded calls {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, which may be read by whom the old one could be."""
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
