"""The tools that Triton ships with its compiler, and their output for a binary."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.machine import machine_errors

TOOL_SECONDS = 120


def dump(cubin: bytes, what: str) -> str:
    """Returns the output of `cuobjdump` for a binary, such as `--dump-sass` for its machine code.

    Raises:
        KernelError: The tool cannot be run, or failed.
        MachineError: This installation of Triton lacks it.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return run_tool(tool_path("cuobjdump"), what, file.name)


def tool_path(name: str) -> str:
    """Returns the path of a tool that Triton ships.

    Raises:
        MachineError: This installation of Triton lacks it, or it is not executable.
    """
    from triton import knobs

    try:
        with machine_errors():
            return str(getattr(knobs.nvidia, name).path)
    except RuntimeError as error:
        raise MachineError(f"this installation of Triton has no {name}: reinstall triton") from error


def run_tool(*command: str) -> str:
    """Returns the standard output and error of one of the compiler's tools.

    Raises:
        KernelError: The tool cannot be run, or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(
            f"{Path(command[0]).name} failed ({type(error).__name__}): reinstall triton"
        ) from error
    return done.stdout + done.stderr
