"""The installed versions of flashtune, torch, Triton and the driver, under which records are valid."""

from pathlib import Path

from flashtune.core import VERSION
from flashtune.core.machine import torch_version, triton_version
from flashtune.core.record import Versions
from flashtune.templates.registry import template_hash

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
HOPPER = 90
# Value of the driver's version if there is no driver.
NO_DRIVER = "none"


def current_versions(family_name: str) -> Versions:
    """Returns the installed versions for a record of this family."""
    return Versions(
        flashtune=VERSION,
        template=template_hash(family_name),
        torch=torch_version(),
        triton=triton_version(),
        ptxas=_ptxas_version(),
        driver=driver_version(),
    )


def driver_version() -> str:
    """Returns the version of the GPU driver, or `none` without one."""
    try:
        return NVIDIA_DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return NO_DRIVER


def _ptxas_version() -> str:
    """Returns the version of the ptxas that Triton runs for Hopper, of those that it contains."""
    from triton.backends.nvidia.compiler import get_ptxas

    from flashtune.core.machine import machine_errors

    with machine_errors():
        return str(get_ptxas(HOPPER).version)
