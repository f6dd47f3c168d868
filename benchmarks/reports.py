"""Compressed reports that long scripts save, and from which they continue after an interruption."""

import gzip
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.db.codec import brief

MAX_FILE_BYTES = 64 * 2**20

Report = TypeVar("Report", bound=msgspec.Struct)


def write_report(report: msgspec.Struct, path: Path) -> None:
    """Replaces a file by a report at once. Equal reports give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(gzip.compress(msgspec.json.encode(report), mtime=0))
    draft.replace(path)


def read_report(path: Path, kind: type[Report]) -> Report:
    """The report of a file."""
    try:
        with gzip.open(path) as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=kind)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise TableError(f"{path} is no {kind.__name__} ({brief(error)}): make it anew") from error


def names(label: str, config: Config) -> bool:
    """Whether a report's label names a config: choices that its family did not have then are the defaults."""
    named = dict(word.split("=") for word in label.split())
    if not named.keys() <= set(config.__struct_fields__):
        return False
    try:
        return msgspec.convert(named, type(config), strict=False) == config
    except msgspec.ValidationError:
        # Choices that the family has no longer.
        return False
