"""Check of the memory limit (`ulimit -v`), under which torch and Triton may fail to load."""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Iterator
from pathlib import Path

# The libraries of torch and Triton. At least this fraction of their bytes is loaded.
LIBRARIES = (("torch", "lib/*.so*"), ("triton", "_C/*.so"))
LOADED_SHARE = 0.75


def address_space_fault() -> str | None:
    """Returns a sentence for a memory limit that is too low for torch and Triton, otherwise None.

    Under such a limit their libraries raise, abort the process or hang.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    needed = sum(file.stat().st_size for pattern in LIBRARIES for file in _files(*pattern))
    if limit >= LOADED_SHARE * needed:
        return None
    return (
        f"the limit of {limit >> 20} MiB of memory is too low for torch and Triton, whose libraries have "
        f"{needed >> 20} MiB: raise the limit (`ulimit -v`)"
    )


def _files(package: str, pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from Path(folder).glob(pattern)
