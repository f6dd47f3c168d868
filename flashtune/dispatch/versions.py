"""The installed versions of flashtune, torch, Triton and the driver, under which records are valid."""

from __future__ import annotations

import functools
import importlib.util
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path

from flashtune.core.record import Record, Versions
from flashtune.core.target import names_gpu
from flashtune.templates.registry import template_hash

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
HOPPER = 90
# Value of the driver's version if there is no driver.
NO_DRIVER = "none"
TRITON_VERSION = re.compile(r"^__version__ = ['\"](.+)['\"]$", re.MULTILINE)


@functools.cache
def current_versions(family_name: str) -> Versions:
    """Returns the installed versions for a record of this family."""
    return Versions(
        flashtune=package_version(),
        template=template_hash(family_name),
        torch=torch_version(),
        triton=triton_version(),
        ptxas=_ptxas_version(),
        driver=driver_version(),
    )


def torch_version() -> str:
    """Returns `torch.__version__` without importing torch, which takes 1.5 s of CPU time.

    The version in the package's metadata may lack the part after `+`, such as `cu130`.

    Raises:
        ImportError: torch is not installed.
    """
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(loaded.__version__)
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("torch is not installed")
    # torch reads its version from this file, which does not import torch.
    return str(runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"])


def triton_version() -> str:
    """Returns `triton.__version__`, without importing Triton if the version is in its source.

    Raises:
        ImportError: Triton is not installed.
    """
    found = None if "triton" in sys.modules else importlib.util.find_spec("triton")
    text = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
    stated = TRITON_VERSION.search(text)
    if stated is not None:
        return stated[1]
    import triton

    return str(triton.__version__)


def same_makers(one: Versions, other: Versions) -> bool:
    """Whether binaries are the same and run alike under two sets of versions."""
    return one.makers == other.makers


def is_proven(record: Record, here: Versions) -> bool:
    """Whether a record's receipt is valid: the kernel passed on its GPU with these versions."""
    verdict = record.verdict
    return (
        verdict is not None
        and verdict.passed
        and names_gpu(record.target, verdict.device)
        and same_makers(record.versions, here)
    )


def package_version() -> str:
    """Returns the version of the installed flashtune."""
    return metadata.version("flashtune")


@functools.cache
def driver_version() -> str:
    """Returns the version of the GPU driver, or `none` without one."""
    try:
        return NVIDIA_DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return NO_DRIVER


@functools.cache
def _ptxas_version() -> str:
    """Returns the version of the ptxas that Triton runs for Hopper, of those that it contains.

    Raises:
        MachineError: The tool is missing or not executable.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    from flashtune.core.machine import machine_errors

    with machine_errors():
        return str(get_ptxas(HOPPER).version)
