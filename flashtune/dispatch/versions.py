"""The installed versions of flashtune, torch, Triton and the driver, under which records are valid."""

from pathlib import Path

from flashtune.core import VERSION
from flashtune.core.machine import NOT_INSTALLED, machine_errors, ptxas_version, torch_version, triton_version
from flashtune.core.record import Versions
from flashtune.templates.registry import template_hash

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
# Value of the driver's version if there is no driver.
NO_DRIVER = NOT_INSTALLED


def current_versions(family_name: str, driver: str | None = None) -> Versions:
    """Returns the installed versions for a record of this family, with another machine's driver if named."""
    with machine_errors():
        return Versions(
            flashtune=VERSION,
            template=template_hash(family_name),
            torch=torch_version(),
            triton=triton_version(),
            ptxas=ptxas_version(),
            driver=driver or driver_version(),
        )


def driver_version() -> str:
    """Returns the version of the GPU driver, or `none` without one."""
    try:
        return NVIDIA_DRIVER.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return NO_DRIVER
