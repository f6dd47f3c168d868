"""Reads files of shapes."""

from pathlib import Path

import msgspec

from flashtune.core.errors import UsageError
from flashtune.core.files import read_bounded
from flashtune.core.problem import Problem
from flashtune.tuner.workloads.shape_values import parse_values
from flashtune.tuner.workloads.shapes import expand, parse_shape

EXAMPLE = "heads=32,seqlen=4096,head_dim=128,causal"
MAX_FILE_BYTES = 1024 * 1024


def read_shapes_file(path: Path) -> tuple[Problem, ...]:
    """Returns the problems of a file: a shape a line, as text or as a JSON object. `#` starts a comment."""
    problems: list[Problem] = []
    for number, line in enumerate(read_text(path, "shapes file").splitlines(), 1):
        try:
            problems.extend(_parse_line(line.strip()))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise UsageError(f"the shapes file {path} is empty: write a shape a line, as in {EXAMPLE}")
    return tuple(dict.fromkeys(problems))


def read_text(path: Path, what: str) -> str:
    """Returns a small UTF-8 file that a user named."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the {what} {str(path)!r} is not a file name: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"the {what} {path} is larger than {MAX_FILE_BYTES:,} bytes: this is no {what}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} {path} is not UTF-8 text") from error


def _parse_line(line: str) -> tuple[Problem, ...]:
    if not line.startswith("{"):
        text = line.partition("#")[0].strip()
        return parse_shape(text) if text else ()
    try:
        row = msgspec.json.decode(line, type=dict[str, bool | int | str])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"not a JSON object of numbers and words: {error}") from error
    return expand({key: parse_values(key, _as_text(value)) for key, value in row.items()})


def _as_text(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
