"""Finds kernels by earlier digests in files with rendered sources."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from flashtune.core.file_lock import read_bounded
from flashtune.core.kernel import Argument, Kernel, Step, canonical_source

# Many times the size of a kernel's source.
MAX_SOURCE_BYTES = 4 * 1024 * 1024
FILE_NAME = re.compile(r"_([0-9a-f]{8,32})\.py")
# Size of the caches. It is small, because digests are looked up one after another.
KEPT_SOURCES = 16


class EarlierSources:
    """Files with rendered sources in some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Lists the files by the first eight digits of the digest in their names."""
        self._text = functools.lru_cache(maxsize=KEPT_SOURCES)(_text)
        self._paths: dict[str, list[Path]] = {}
        for folder in folders:
            for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
                name = FILE_NAME.search(path.name)
                if name:
                    self._paths.setdefault(name[1][:8], []).append(path)

    def kernel(self, digest: str, like: Kernel) -> Kernel | None:
        """Returns the kernel of a digest with the arguments and options of `like`, None if no file has it."""
        for path in self._paths.get(digest[:8], ()):
            for old in _candidates(like, self._text(path)):
                # The digest authenticates the canonical form, so only that is run.
                plain = msgspec.structs.replace(old, source=canonical_source(old.source))
                if digest == old.digest == plain.digest:
                    return plain
        return None


def _text(path: Path) -> str:
    """Returns the text of a file; empty if it is unreadable, not a regular file, or too large."""
    try:
        raw = read_bounded(path, MAX_SOURCE_BYTES + 1)
        return raw.decode() if len(raw) <= MAX_SOURCE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _candidates(like: Kernel, source: str) -> Iterator[Kernel]:
    """Yields possible kernels of a source: with the present names of arguments, then with its own names."""
    parameters = _parameters(source)
    if like.entry not in parameters:
        return
    kernel = msgspec.structs.replace(like, source=source)
    yield kernel
    steps = {name: getattr(kernel, name) for name in ("prologue", "epilogue")}
    renamed = {
        name: msgspec.structs.replace(step, arguments=_renamed(step, parameters))
        for name, step in steps.items()
        if step is not None
    }
    arguments = _renamed(kernel, parameters)
    yield msgspec.structs.replace(kernel, arguments=arguments, **renamed)


@functools.lru_cache(maxsize=KEPT_SOURCES)
def _parameters(source: str) -> dict[str, tuple[str, ...]]:
    """Returns the parameters of each top-level function of a source."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        node.name: tuple(argument.arg for argument in node.args.args)
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _renamed(kernel: Kernel | Step, parameters: Mapping[str, tuple[str, ...]]) -> tuple[Argument, ...]:
    """Returns a kernel's arguments with the names in the source, if the numbers of parameters are equal."""
    names = parameters.get(kernel.entry, ())
    if len(names) != len(kernel.arguments):
        return kernel.arguments
    pairs = zip(kernel.arguments, names, strict=True)
    return tuple(msgspec.structs.replace(argument, name=name) for argument, name in pairs)
