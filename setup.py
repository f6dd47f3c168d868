"""The rooms at the top of a checkout are sub-packages of flashtune once they are installed.

Packages are found, not listed: a new kernel family is a new folder under `templates/` and nothing
else. All other settings stand in `pyproject.toml`.
"""

from __future__ import annotations

from setuptools import find_packages, setup

FOLDERS = {
    "flashtune": "flashtune",
    "flashtune.tuner": "tuner",
    "flashtune.templates": "templates",
    "flashtune.kernels_generated": "kernels_generated",
    "flashtune.db": "db",
}


def found_packages() -> list[str]:
    """Every package of every folder; those behind the links of a checkout are found twice and kept once."""
    below = {f"{package}.{name}" for package, folder in FOLDERS.items() for name in find_packages(folder)}
    return sorted({*FOLDERS, *below})


setup(packages=found_packages(), package_dir=FOLDERS)
