"""Golden files: rendered kernels as text, or as a checksum where other files take the same branches.

Lines of SHA256SUMS are in the format of `sha256sum`. A kernel whose name stands there has no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
ADVICE = "if meant: pytest tests/templates --update-golden"


def summed(folder: Path) -> set[str]:
    """Names of the kernels that a folder holds as checksums."""
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    return {line.split("  ")[1].removesuffix(".py") for line in lines}


def check(folder: Path, sources: Mapping[str, str], update: bool) -> None:
    """Compares sources by name with the folder's files and checksums, or first writes these."""
    without_file = summed(folder) & sources.keys()
    texts = {f"{name}.py": source for name, source in sources.items() if name not in without_file}
    texts[SUMS] = "".join(_line(name, sources[name]) for name in sorted(without_file))
    if update:
        for path in folder.glob("*.py"):
            path.unlink()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    paths = [folder / SUMS, *folder.glob("*.py")]
    found = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert found.keys() == texts.keys(), ADVICE
    for name, text in texts.items():
        assert found[name] == text, f"{name}: {ADVICE}"


def _line(name: str, source: str) -> str:
    return f"{hashlib.sha256(source.encode()).hexdigest()}  {name}.py\n"
