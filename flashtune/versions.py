"""What is installed here: the versions that a record is made and judged under."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

from flashtune.record import Versions
from flashtune.templates.hashing import template_hash

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
HOPPER = 90


@functools.cache
def current_versions(family_name: str) -> Versions:
    """The versions that make a record of this family here and now."""
    import torch
    import triton

    return Versions(
        flashtune=package_version(),
        template=template_hash(family_name),
        torch=str(torch.__version__),
        triton=triton.__version__,
        ptxas=_ptxas_version(),
        driver=driver_version(),
    )


def package_version() -> str:
    """The installed flashtune's version."""
    return metadata.version("flashtune")


@functools.cache
def driver_version() -> str:
    """The GPU driver's version, or `none` without one."""
    try:
        return NVIDIA_DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return "none"


@functools.cache
def _ptxas_version() -> str:
    """Of the assemblers that a Triton brings along, the one that it runs for Hopper."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(HOPPER).version)
