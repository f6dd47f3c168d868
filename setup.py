"""The rooms at the top of a checkout are sub-packages of flashtune once they are installed.

Packages are found, not listed: a new kernel family is a new folder under `templates/` and nothing
else. All other settings stand in `pyproject.toml`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

# A Markdown link to an address without a scheme. A package index has none of the files that such links name.
RELATIVE_LINK = re.compile(r"(?<!!)\[(?P<text>[^][]+)\]\((?![a-z]+:)[^()]*\)")

FOLDERS = {
    "flashtune": "flashtune",
    "flashtune.tuner": "tuner",
    "flashtune.templates": "templates",
    "flashtune.db": "db",
}


def found_packages() -> list[str]:
    """Every package of every folder; those behind the links of a checkout are found twice and kept once."""
    below = {f"{package}.{name}" for package, folder in FOLDERS.items() for name in find_packages(folder)}
    return sorted({*FOLDERS, *below})


def readme() -> str:
    """Returns README.md for a package index: a link to a file of the checkout becomes its text alone."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return RELATIVE_LINK.sub(r"\g<text>", text)


setup(
    packages=found_packages(),
    package_dir=FOLDERS,
    long_description=readme(),
    long_description_content_type="text/markdown",
)
