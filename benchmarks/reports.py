"""Reports that long scripts save, and from which they continue after an interruption."""

import gzip
from pathlib import Path

import msgspec

from flashtune.core.config import Config


def write_report(report: msgspec.Struct, path: Path) -> None:
    """Replaces a file by a report at once. Equal reports give equal bytes.

    `benchmarks.saved.decoded` reads it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    data = msgspec.json.encode(report)
    draft.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    draft.replace(path)


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
