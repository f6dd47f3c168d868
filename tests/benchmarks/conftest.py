"""Benchmarks are no part of the installed package: they are found in the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

# Behind all else, so that what is installed is still found where it is installed.
sys.path.append(str(Path(__file__).parents[2]))
