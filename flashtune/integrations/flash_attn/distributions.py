"""The distributions `flash-attn` and `flash-attn-3`, for libraries that look for an installed package.

They have a name, a version and modules, and no files.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

VERSION = "2.8.4"


class Package(NamedTuple):
    """A version, and the top-level modules."""

    version: str
    modules: tuple[str, ...]


PACKAGES = {
    "flash-attn": Package(VERSION, ("flash_attn",)),
    "flash-attn-3": Package("3.0.0", ("flash_attn_3", "flash_attn_interface")),
}


class FlashAttnDistribution(metadata.Distribution):
    """A distribution whose modules `flashtune.integrations.flash_attn.patch` has installed."""

    def __init__(self, name: str) -> None:
        self.package = name

    def read_text(self, filename: str) -> str | None:
        """Returns the text of a file of metadata, or None if there is no such file."""
        version, modules = PACKAGES[self.package]
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {version}\n",
            "top_level.txt": "\n".join(modules),
        }
        return texts.get(filename)

    def locate_file(self, path: object) -> Path:
        """Returns a path where there is no file."""
        return Path(__file__).parent / "absent" / str(path)


class Finder(MetaPathFinder):
    """Finds these distributions, and no modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Returns None, because `sys.modules` has the modules."""
        del fullname, path, target

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        """Returns the distributions of a name, or all."""
        wanted = None if context is None or context.name is None else context.name.lower().replace("_", "-")
        return [FlashAttnDistribution(name) for name in PACKAGES if wanted in (None, name)]


FINDER = Finder()


def announce() -> None:
    """Lets `importlib.metadata` find the distributions before those that are installed."""
    sys.meta_path.insert(0, FINDER)


def withdraw() -> None:
    """Undoes `announce`."""
    sys.meta_path.remove(FINDER)
